"""Benchmarks: ``python -m bench``."""


class BenchError(Exception):
    """What keeps a benchmark from running here, and what to do about it."""
