"""The shard format: written, read and verified."""
