"""Several data sets as one: their common description, and a reader over their readers."""
