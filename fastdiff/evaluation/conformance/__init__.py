"""Whether a run is like the runs of its recipe: references, the comparison with them, and likely causes."""
