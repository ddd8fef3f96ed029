"""The diffusion transformer (DiT)."""
