"""Training scripts of diffusers."""
