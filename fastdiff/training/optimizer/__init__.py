"""Optimizer, its state by slices, and its learning-rate schedule."""
