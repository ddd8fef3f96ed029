"""Adapter files: the names of layers in other programs, the forms of files, and what the programs read of them.

To support a network here, add a table to ``native_names`` and its measured rows to ``readers``.
"""
