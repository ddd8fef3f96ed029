"""The memory of a run: the micro-batch that it is given, and what happens when it does not suffice."""
