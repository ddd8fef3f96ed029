"""Checks that precede timing: accuracy of ops and properties of compiled code."""
