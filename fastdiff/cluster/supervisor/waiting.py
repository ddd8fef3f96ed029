"""Wait for a key of a store without blocking signals."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_SLICE_S = 0.5


def value_of(store: Store, key: str, deadline: float) -> bytes:
    """Return the value of ``key`` once it is set.

    The store waits in C, where Python's signal handlers do not run; each wait is therefore short.

    Args:
        store: any store.
        key: the key.
        deadline: deadline on the monotonic clock.

    Raises:
        torch.distributed.DistStoreError: the key was not set before the deadline.
        torch.distributed.DistNetworkError: the process that hosts the store is gone.
    """
    from torch.distributed import DistStoreError  # type: ignore[attr-defined]  # a single node never waits

    while True:
        left = deadline - time.monotonic()
        try:
            store.wait([key], timedelta(seconds=max(0.001, min(_SLICE_S, left))))
            return store.get(key)
        except DistStoreError:
            if left <= _SLICE_S:
                raise
