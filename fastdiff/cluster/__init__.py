"""Runs on many machines: start them, watch them, report which node or rank failed first and why."""

import os

# torch reads it at import, here and in the ranks. Its warnings about connections closed at a normal end mean nothing.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
