"""The text encoders of a pipeline, loaded: captions to the conditions that their record names."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastdiff.conditions import CONDITIONS
from fastdiff.errors import require
from fastdiff.models.encoders.family import TextEncoder, TextEncoderFamily


class TextEncoders:
    """Frozen text encoders on a device; see ``TextEncoder``.

    Raises:
        ConfigError: from ``__call__`` and ``null``: they return other conditions than their record names, or a mask
            that is not bool or excludes every token of a caption.
    """

    def __init__(self, family: TextEncoderFamily, loaded: TextEncoder) -> None:
        self._family, self._loaded = family, loaded
        self.parameters, self.cut = loaded.parameters, loaded.cut

    def __call__(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return the conditions of N captions, ``[N, ...]`` each."""
        return self._checked(self._loaded(captions), "for captions")

    def null(self) -> dict[str, Tensor]:
        """Return the null condition, ``[...]`` each."""
        return self._checked(self._loaded.null(), "from null()")

    def _checked(self, found: dict[str, Tensor], where: str) -> dict[str, Tensor]:
        family, names = self._family, " and ".join(found)
        package = type(self._loaded).__module__.partition(".")[0]
        what = f"the text encoder {' with '.join(family.classes)} of {package}"
        require(
            {*found} == {*family.conditions},
            f"{what} returns {names or 'nothing'} {where}, expected {' and '.join(family.conditions)}, the conditions "
            "of its record; mend that package",
        )
        for name in (name for name in found if CONDITIONS[name].dtype == "bool"):
            mask = found[name]
            require(mask.dtype == torch.bool, f"{what} returns {name} in {mask.dtype} {where}, expected torch.bool")
            valid = bool(mask.any(-1).all())
            require(valid, f"{what} returns a {name} without a valid token {where}, expected at least one per caption")
        return found
