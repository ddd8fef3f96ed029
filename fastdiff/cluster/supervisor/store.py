"""Where the supervisors keep their messages: node 0's TCPStore, or a dictionary if there is only one node.

Torch is imported only for several nodes, because its import takes seconds.
"""

import sys
from typing import Protocol


class Store(Protocol):
    """The calls of torch's stores that the supervisors use."""

    def set(self, key: str, value: str, /) -> None:
        """Set a key."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that is set."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys are set."""

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """Set a key whose value is ``expected``, or that is not set if that is empty; return the value it then has."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number, 0 before, and return the sum."""


class LocalStore:
    """The store of a single node; see ``Store``. Only one thread uses it."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def set(self, key: str, value: str, /) -> None:
        """See ``Store``."""
        self._values[key] = value

    def get(self, key: str, /) -> bytes:
        """See ``Store``."""
        return self._values[key].encode()

    def check(self, keys: list[str], /) -> bool:
        """See ``Store``."""
        return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """See ``Store``."""
        if self._values.get(key, "") == expected:
            self._values[key] = value
        return self._values.get(key, "").encode()

    def add(self, key: str, amount: int, /) -> int:
        """See ``Store``."""
        total = int(self._values.get(key, "0")) + amount
        self._values[key] = str(total)
        return total


def lost() -> tuple[type[Exception], ...]:
    """Return the errors of a store whose host is gone: ``DistError`` of torch, none before torch is imported."""
    torch = sys.modules.get("torch.distributed")
    return () if torch is None else (torch.DistError,)
