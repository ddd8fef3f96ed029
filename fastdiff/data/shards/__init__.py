"""The shard format, its writer, reader, cache and verification."""
