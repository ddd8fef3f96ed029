"""A network of another package; ``test_family.py`` registers and uses it."""
