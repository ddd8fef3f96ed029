"""Encoding of images and captions into shards of latents and text embeddings."""
