"""Transformers that diffusers computes, one file per family."""
