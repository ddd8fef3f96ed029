"""Readers compared by ``python -m bench data``, and their samples."""
