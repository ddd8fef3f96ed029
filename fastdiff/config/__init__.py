"""Configuration of a run: every option with its default and its checks. This package imports no torch."""
