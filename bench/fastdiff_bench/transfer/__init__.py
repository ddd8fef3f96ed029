"""Transfer of learning rates between widths (muP): the coordinate check, and sweeps of the learning rate."""
