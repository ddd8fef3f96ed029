"""Forward and backward passes of micro-batches: operation by operation, or as a CUDA graph."""
