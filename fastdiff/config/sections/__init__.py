"""Sections of the configuration of a run, one dataclass each."""
