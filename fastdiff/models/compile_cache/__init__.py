"""Code that torch.compile and Triton have compiled, kept for the next start of a run."""
