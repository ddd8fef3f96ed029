"""Inductor's code for a GPU that is not present: what the compiled blocks of a network launch, move and store."""
