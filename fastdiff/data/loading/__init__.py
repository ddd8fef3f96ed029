"""Batches on the training device: sample order, loaders for shards, online encoding of images."""
