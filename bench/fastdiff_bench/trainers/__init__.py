"""Trainers of ``bench step`` and ``bench scale``: fastdiff and its baselines, one module each."""
