"""What the engine does inside DeepSpeed's ZeRO optimizers."""
