"""Who steps in ``bench step`` and ``bench scale``: fastdiff and what it is compared with, one module each."""
