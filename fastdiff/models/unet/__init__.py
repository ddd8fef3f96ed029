"""Stable Diffusion's UNet."""
