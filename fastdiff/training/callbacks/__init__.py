"""Callbacks after every step: log, checkpoints, previews, validation, divergence."""
