"""Statistics of a run for its comparison with a reference: what the network gets, its weights and their averages."""
