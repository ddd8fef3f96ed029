"""Profile of some steps of a run: named ranges, a trace and a snapshot of the memory."""
