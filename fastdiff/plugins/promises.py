"""Checks of a plug-in by dry calls: no host synchronisation, and numbers that only the position decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastdiff.errors import ConfigError

SAMPLES = 4
"""Samples of a dry call."""
_SPLIT = [1, 3]
"""Sizes of the parts in which they are given again."""
_TOLERANCE = 1e-3
"""Largest difference between two ways to compute the same numbers, relative to their size; sums round differently."""
_FORBIDDEN = {
    "_local_scalar_dense": "reads a number from the device, as .item(), float(x), if x: and x.tolist() do",
    "is_nonzero": "reads a number from the device, as if x: does",
    "nonzero": "has a shape that depends on values, as x[mask] and torch.nonzero do; use torch.where",
    "masked_select": "has a shape that depends on values; use torch.where",
    "lift_fresh": "copies a constant from the host, as torch.tensor(0.5) does; keep it as a buffer or a plain number",
}


class HostSyncError(RuntimeError):
    """An operation made the host wait for the device, or copied to it."""


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


class NoHostSync(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises HostSyncError where the host would wait for a GPU, or copy a constant to it; on a CPU, too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].split(".")[0]
        if func.namespace == "aten" and name in _FORBIDDEN:
            raise HostSyncError(f"{func.name()} {_FORBIDDEN[name]}")
        if name in ("index", "index_put_") and any(_is_mask(index) for index in args[1]):
            raise HostSyncError(f"{func.name()} {_FORBIDDEN['nonzero']}")
        goes = (kwargs or {}).get("device") if name == "_to_copy" else None
        if goes is not None and goes != args[0].device:
            raise HostSyncError(f"{func.name()} copies to another device")
        return func(*args, **(kwargs or {}))


Call = Callable[[Mapping[str, Tensor]], Tensor]
"""A dry call: named inputs, ``SAMPLES`` rows each, to an output with as many rows."""


def require_by_position(call: Call, inputs: Mapping[str, Tensor], what: str) -> Tensor:
    """Require numbers that follow from each sample and its position alone, and no host synchronisation.

    The call is made twice, and once more with the samples in parts of other sizes.

    Args:
        call: the code.
        inputs: ``[SAMPLES, ...]`` each.
        what: the plug-in, for messages.

    Returns:
        The output ``[SAMPLES, ...]``.

    Raises:
        ConfigError: two calls differ, the batch decides a sample, a generator with state is drawn from, or the host
            waits for the device.
    """
    state = torch.get_rng_state()
    with without_host_sync(what):
        first = call(inputs)
    if not torch.equal(state, torch.get_rng_state()):
        raise ConfigError(
            f"{what} draws from torch's generator, whose numbers depend on the ranks and on resumes; key every random "
            "number by the position (fastdiff.rng), or leave it out"
        )
    if not bool(first.isfinite().all()):
        raise ConfigError(f"{what} returns numbers that are not finite for finite inputs")
    if not close(call(inputs), first):
        raise ConfigError(f"{what} returns other numbers when it is called again; it must not keep a state")
    parts = {name: torch.split(value, _SPLIT) for name, value in inputs.items()}
    apart = torch.cat([call({name: value[i] for name, value in parts.items()}) for i in range(len(_SPLIT))])
    if not close(apart, first):
        raise ConfigError(
            f"{what} returns other numbers for a sample in another micro-batch; a sample must not depend on the rest "
            "of its batch (as in a BatchNorm, or a mean over the batch)"
        )
    return first


def without_host_sync(what: str) -> _Explaining:
    """Return a context in which a host synchronisation is a ConfigError about ``what``."""
    return _Explaining(what)


class _Explaining(NoHostSync):  # type: ignore[no-untyped-call]
    def __init__(self, what: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._what = what

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if isinstance(error, HostSyncError):
            raise ConfigError(f"{self._what}: {error}; every step would wait for it") from error


def close(a: Tensor, b: Tensor) -> bool:
    """Return whether two outputs are equal up to rounding."""
    scale = float(b.detach().abs().max()) or 1.0
    return a.shape == b.shape and float((a - b).detach().abs().max()) <= _TOLERANCE * scale
