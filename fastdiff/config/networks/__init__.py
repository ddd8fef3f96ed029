"""Configurations of the networks. This package imports no torch."""
