"""Plans of a run before there is a GPU: its memory, its time and its price on machines of a table."""
