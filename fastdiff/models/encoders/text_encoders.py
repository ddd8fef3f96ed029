"""The text encoders of a pipeline, loaded: captions to the conditions that their record names."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fastdiff.conditions import CONDITIONS, problem_of_shapes
from fastdiff.errors import require
from fastdiff.models.encoders.family import TextEncoder, TextEncoderFamily
from fastdiff.models.encoders.registry import faults_in

_METHODS = ("__call__", "null", "parameters")
_TELLS_CUTS = ("lost", "cut")
"""It has one of these."""


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
        missing += [] if any(hasattr(loaded, name) for name in _TELLS_CUTS) else [" or ".join(_TELLS_CUTS)]
        expected = ", ".join([*_METHODS, " or ".join(_TELLS_CUTS)])
        require(not missing, f"{self._what} has no method {' and no '.join(missing)}; expected {expected}")
        self._family, self._loaded = family, loaded
        self._device, self._dtype = device, dtype
        self.parameters = loaded.parameters

    def lost(self, captions: Sequence[str]) -> Mapping[int, int]:
        """Return the tokens of these captions that are not read, by the number that is read; 0: how many is unknown.

        Empty: all captions are read whole.
        """
        if (lost := getattr(self._loaded, "lost", None)) is not None:
            return dict(lost(captions))
        limit = self._loaded.cut(captions)  # type: ignore[attr-defined]
        return {} if limit is None else {limit: 0}

    def batches(self, captions: Sequence[str], size: int) -> list[list[int]]:
        """Return the numbers of the captions of each pass through the encoders.

        Captions of like length are computed together, the longest ones first, by encoders that pad to the longest one;
        by others in their order.
        """
        numbers = list(range(len(captions)))
        if (lengths := getattr(self._loaded, "lengths", None)) is not None:
            found = lengths(captions)
            numbers.sort(key=lambda number: -found[number])  # stable
        return [numbers[start : start + size] for start in range(0, len(numbers), size)]

    @torch.no_grad()
    def __call__(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return the conditions of N captions, ``[N, ...]`` each."""
        with faults_in(self._family, f"{self._what}: __call__"):
            return self._checked(self._loaded(captions), "__call__", (len(captions),))

    @torch.no_grad()
    def negative(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return the conditions of N negative prompts, ``[N, ...]`` each."""
        if (negative := getattr(self._loaded, "negative", None)) is None:
            return self(captions)
        with faults_in(self._family, f"{self._what}: negative"):
            return self._checked(negative(captions), "negative", (len(captions),))

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
