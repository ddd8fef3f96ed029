"""A network as another package would bring it; ``test_family.py`` installs and uses it."""
