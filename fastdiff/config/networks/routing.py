"""Tokens that the middle blocks of a transformer leave out in training. This module imports no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

SCORES, PATH = DRAWN = "token_scores", "sparse_path"
"""Conditions of the network, which only a training step draws: which tokens are kept, and whether their path counts."""

RoutingName = Literal["none", "tread", "sprint"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Tokens that a network leaves out in training; in sampling and evaluation all pass all blocks."""

    tokens: int
    """Tokens per sample in front of the first block that leaves some out."""
    kept: int
    """Tokens per sample in the blocks that leave some out: a random choice for each sample."""
    blocks: range
    """These blocks, counted from 0."""
    path_drop: float | None
    """Probability that an optimizer step loses the output of these blocks; None: the network cannot do without."""
    dense_share: float
    """Share of the training, at its end, in which all tokens pass all blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingKind:
    """A way to leave tokens out, with the values of its publication."""

    share: float
    """Share of the tokens that is left out."""
    behind: int
    """Blocks behind those that leave tokens out."""
    kept: Callable[[int, float], int]
    """Tokens that are kept, of how many, for a share that is left out; rounded as published."""
    path_drop: float | None
    """As in ``Route``. With a number the network has a mask token, and a layer that joins both paths."""


ROUTINGS: Mapping[RoutingName, RoutingKind] = {
    "tread": RoutingKind(
        share=0.5, behind=3, kept=lambda tokens, share: tokens - int(tokens * share), path_drop=None
    ),
    "sprint": RoutingKind(
        share=0.75, behind=2, kept=lambda tokens, share: max(1, int(tokens * (1.0 - share))), path_drop=0.05
    ),
}  # fmt: skip
"""TREAD (Krause et al. 2025, arXiv:2501.04765) and SPRINT (Park et al. 2025, arXiv:2510.21986), by
``--model.routing``."""
