"""Experiment trackers: TensorBoard, Weights & Biases and trackio show the numbers and pictures of a run."""
