"""Kernels of fastdiff: each next to its reference in plain torch. Depends on torch and Triton only."""

__version__ = "0.2.0"
