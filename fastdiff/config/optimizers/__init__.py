"""Optimizers: one record each, without torch, and the registry that finds them by name."""
