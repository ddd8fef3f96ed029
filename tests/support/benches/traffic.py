"""Counter of the bytes that kernels load and store in Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder


@dataclass
class Traffic:
    """Bytes of the addressed elements, without masked ones."""

    loaded: int = 0
    stored: int = 0

    @property
    def bytes(self) -> int:
        return self.loaded + self.stored


@contextmanager
def counting() -> Iterator[Traffic]:
    """Count every load and store of the kernels that run inside, from whatever kernel file."""
    traffic = Traffic()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        traffic.loaded += _bytes(pointers, mask)
        return load(self, pointers, mask, *rest)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        traffic.stored += _bytes(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    InterpreterBuilder.create_masked_load = counted_load
    InterpreterBuilder.create_masked_store = counted_store
    try:
        yield traffic
    finally:
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store


def _bytes(pointers: Any, mask: Any) -> int:
    return int(np.count_nonzero(mask.data)) * pointers.get_element_ty().primitive_bitwidth // 8
