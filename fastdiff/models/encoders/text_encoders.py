"""The text encoders of a pipeline, loaded: captions to the conditions that their record names."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fastdiff.conditions import CONDITIONS, problem_of_shapes
from fastdiff.errors import require
from fastdiff.models.encoders.family import TextEncoder, TextEncoderFamily
from fastdiff.models.encoders.registry import faults_in

_METHODS = ("__call__", "cut", "null", "parameters")


class TextEncoders:
    """Frozen text encoders; see ``TextEncoder``. What they return is checked, and moved to one device and dtype.

    Args:
        family: their record.
        loaded: what its ``load`` has returned.
        device: of the conditions.
        dtype: of the embeddings; masks are bool.

    Raises:
        ConfigError: from all members: a method is missing, or returns other conditions than their record names, other
            shapes than ``fastdiff.conditions`` has, or a mask that is not bool or excludes every token of a caption.
    """

    def __init__(
        self, family: TextEncoderFamily, loaded: TextEncoder, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        kind = type(loaded)
        self._what = f"the text encoder {' with '.join(family.classes)} ({kind.__module__}.{kind.__qualname__})"
        missing = [name for name in _METHODS if not callable(getattr(loaded, name, None))]
        require(not missing, f"{self._what} has no method {' and no '.join(missing)}; expected {', '.join(_METHODS)}")
        self._family, self._loaded = family, loaded
        self._device, self._dtype = device, dtype
        self.parameters, self.cut = loaded.parameters, loaded.cut

    @torch.no_grad()
    def __call__(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return the conditions of N captions, ``[N, ...]`` each."""
        with faults_in(self._family, f"{self._what}: __call__"):
            return self._checked(self._loaded(captions), "__call__", (len(captions),))

    @torch.no_grad()
    def null(self) -> dict[str, Tensor]:
        """Return the null condition, ``[...]`` each."""
        with faults_in(self._family, f"{self._what}: null"):
            return self._checked(self._loaded.null(), "null", ())

    def _checked(self, found: Mapping[str, Tensor], method: str, rows: tuple[int, ...]) -> dict[str, Tensor]:
        what, names = f"{self._what}: {method} returns", self._family.conditions
        tensors = isinstance(found, Mapping) and all(isinstance(value, Tensor) for value in found.values())
        require(tensors, f"{what} a {type(found).__name__}, expected a dict of tensors: {', '.join(names)}")
        require(
            {*found} == {*names},
            f"{what} {' and '.join(found) or 'nothing'}, expected {' and '.join(names)}, the conditions of its record",
        )
        for name, value in found.items():
            shape, expected = list(value.shape), f"[{', '.join(map(str, rows))}, ...]"
            require(shape[: len(rows)] == [*rows], f"{what} {name} {shape}, expected {expected}")
        problem = problem_of_shapes({name: tuple(value.shape[len(rows) :]) for name, value in found.items()})
        require(problem is None, f"{what} wrong shapes{' of a caption' if rows else ''}: {problem}")
        return {name: self._moved(name, value, what) for name, value in found.items()}

    def _moved(self, name: str, value: Tensor, what: str) -> Tensor:
        if CONDITIONS[name].dtype != "bool":
            return value.to(self._device, self._dtype)
        require(value.dtype == torch.bool, f"{what} {name} in {value.dtype}, expected torch.bool")
        valid = bool(value.any(-1).all())
        require(valid, f"{what} a {name} without a valid token, expected at least one per caption")
        return value.to(self._device)
