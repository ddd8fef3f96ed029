"""The networks by family, LoRA, and the choice of kernels."""
