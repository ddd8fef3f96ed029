"""An optimizer of another package; ``test_toy_optimizer.py`` installs and uses it."""
