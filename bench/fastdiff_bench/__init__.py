"""Benchmarks: ``fastdiff bench``."""


class BenchError(Exception):
    """A benchmark cannot run here; the message gives the reason and the remedy."""
