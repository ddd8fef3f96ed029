"""Time of a step by class of operation, from a trace."""
