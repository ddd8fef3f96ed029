"""Networks by family, pretrained weights, LoRA, and the choice of kernels."""
