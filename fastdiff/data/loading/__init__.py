"""From shards to batches on the training device: order, loaders, batches."""
