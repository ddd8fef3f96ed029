"""Pretrained pipelines, and weights and trainings published by other projects, read safely."""
