"""Encoding: from images to shards of latents."""
