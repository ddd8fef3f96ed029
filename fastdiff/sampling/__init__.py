"""Sampling of images from a trained run."""
