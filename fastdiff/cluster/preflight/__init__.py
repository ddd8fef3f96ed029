"""Checks of all nodes before the ranks start."""
