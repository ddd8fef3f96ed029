"""Frozen encoders of pipelines: one file and one record per autoencoder, and per set of text encoders."""
