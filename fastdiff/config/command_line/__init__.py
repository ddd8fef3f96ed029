"""The command line of a run, its config files, and what both complete and explain."""
