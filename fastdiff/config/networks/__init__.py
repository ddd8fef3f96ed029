"""Shapes of the networks. Free of torch."""
