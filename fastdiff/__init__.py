"""fastdiff: train diffusion models from sharded latents, fast, at any scale."""

__version__ = "0.1.0"
