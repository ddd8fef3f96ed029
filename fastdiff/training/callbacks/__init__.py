"""Everything periodic: log, checkpoints, previews, validation, divergence."""
