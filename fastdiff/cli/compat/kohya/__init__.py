"""Training scripts of kohya's sd-scripts for Stable Diffusion XL."""
