"""Torch dispatch modes: checks of every operation inside a context."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class NoSync(TorchDispatchMode):
    """Fails on operations that make the host wait for a GPU, or copy a constant to it."""

    FORBIDDEN = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "lift_fresh")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        assert name not in self.FORBIDDEN, f"{func.name()} waits for the device or copies to it"
        assert name != "_to_copy" or (kwargs or {}).get("device") is None, "a copy to another device"
        return func(*args, **(kwargs or {}))


class Copies(TorchDispatchMode):
    """Counts the copies of tensors of four axes or of a whole map of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("clone", "copy_", "contiguous", "_to_copy") and args[0].dim() >= 3:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Counts all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.total += 1
        return func(*args, **(kwargs or {}))
