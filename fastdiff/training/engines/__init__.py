"""The engines: a model with its optimizer, under DeepSpeed or in flat buffers."""
