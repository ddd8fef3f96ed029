"""Flags of the trainer that are no fields of the run: other units of its length, and the short help."""
