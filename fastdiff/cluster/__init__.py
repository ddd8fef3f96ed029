"""Runs on many machines: start them, watch them, say which node or rank failed first and why."""

import os

# torch reads it when it is imported, here and in the ranks: it warns of every connection that an ordinary end closes.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
