"""Training data: the shard format, the loaders, image sources and encoding."""
