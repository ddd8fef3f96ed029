"""The version of the package, and the folder that it lies in."""

from pathlib import Path

__version__ = "0.2.0"
PACKAGE = Path(__file__).parent
