"""Measurement of steps and calls, in one process and interleaved over several."""
