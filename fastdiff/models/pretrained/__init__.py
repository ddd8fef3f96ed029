"""Weights and trainings of others, opened safely."""
