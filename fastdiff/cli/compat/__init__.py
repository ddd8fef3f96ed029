"""Command lines of other trainers, translated."""
