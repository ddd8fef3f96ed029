"""fastdiff: train diffusion models from sharded latents, fast, at any scale."""

__version__ = "0.2.0"
