"""Shifts, scales and gates from the condition: a linear layer per block, or one for all blocks and tables."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class AdaLNModulation(nn.Sequential):
    """``parts`` vectors of shift, scale or gate from the condition: ``[B, D] -> [B, parts * D]``."""

    def __init__(self, hidden: int, parts: int) -> None:
        super().__init__(nn.SiLU(), nn.Linear(hidden, parts * hidden))


class SharedModulation(AdaLNModulation):
    """That of all blocks together in adaLN-single (Chen et al. 2023, arXiv:2310.00426, section 2.3)."""


class TableModulation(nn.Module):
    """A learned table added to what all blocks share: ``[B, parts * D]``, or ``[B, D]`` for all parts."""

    def __init__(self, hidden: int, parts: int) -> None:
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.empty(parts, hidden))

    def forward(self, shared: Tensor) -> Tensor:
        """``[B, parts * D]`` or ``[B, D] -> [B, parts * D]``."""
        hidden = self.scale_shift_table.shape[1]
        parts = self.scale_shift_table + shared.view(len(shared), -1, hidden)  # [B, parts, D]
        return parts.flatten(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModulationKind:
    """A way from the condition ``[B, D]`` to shifts, scales and gates."""

    shared: Callable[[int], nn.Module]
    """Constructor, by the width, of what all blocks share: its output is their condition."""
    of_layer: Callable[[int, int], nn.Module]
    """Constructor, by width and number of parts, of what each block and the last layer have."""


MODULATIONS: Mapping[str, ModulationKind] = {
    "adaln": ModulationKind(shared=lambda hidden: nn.Identity(), of_layer=AdaLNModulation),
    "adaln-single": ModulationKind(shared=lambda hidden: SharedModulation(hidden, 6), of_layer=TableModulation),
}
"""By ``--model.modulation``."""
