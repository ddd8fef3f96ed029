"""Checkpoints on disk: written, verified, read, and the weights to use from one."""
