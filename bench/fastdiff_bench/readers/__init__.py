"""Readers compared by ``fastdiff bench data``, and their samples."""
