"""Images from a trained run."""
