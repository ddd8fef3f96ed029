"""The ranks of a run: who they are, how they agree, and whether they are alive."""
