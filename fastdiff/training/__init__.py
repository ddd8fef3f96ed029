"""Training: the engine, and the parts of a run in memory."""
