"""Samples: the shard format, the loaders, image sources, and encoding."""
