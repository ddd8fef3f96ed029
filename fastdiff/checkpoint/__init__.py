"""Checkpoints on disk: writing, verification, reading, and selection of their weights."""
