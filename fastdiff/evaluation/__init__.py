"""Measures of a run: validation loss, likelihood, FID, and the digits."""
