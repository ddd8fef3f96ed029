"""How steps and calls are measured, in one process and in turns."""
