"""Benchmarks: ``python -m bench``."""
