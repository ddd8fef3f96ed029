"""Who reads the samples of ``python -m bench data``, and what they read."""
