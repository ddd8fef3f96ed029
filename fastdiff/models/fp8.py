"""Blocks whose linear layers multiply in FP8 (``--performance.fp8``): which become such, and where they can run."""

from typing import Any, Protocol

import torch
from torch import nn

from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.errors import ConfigError, require
from fastdiff.models.blockwise import BlockwiseModel
from fastdiff.models.delayed_scales import DelayedScales, LayerScales, forms
from fastdiff.models.family import family_of
from fastdiff_kernels.fp8.values import MULTIPLE

LEAST = 1024
"""Input and output features from which a layer gains."""
_FP8 = (8, 9)
"""Ada, the first capability with FP8 products."""


class Fp8Block(Protocol):
    """A block that multiplies in FP8, made of one of ``ModelFamily.fp8_block``'s base class, in place."""

    scales: tuple[LayerScales, ...]
    """Those of each group of ``layers``."""

    @staticmethod
    def problem(config: Any) -> str | None:
        """Return what the blocks of a network have that those in FP8 lack; None: nothing."""

    @staticmethod
    def layers(block: Any) -> tuple[list[nn.Linear], ...]:
        """Return the layers that multiply in FP8, in groups; each group has one function, and one probe."""

    @staticmethod
    def rows(block: Any) -> int:
        """Return the tokens per sample."""


def inner_blocks(model: BlockwiseModel, performance: PerformanceConfig) -> list[nn.Module]:
    """Return the blocks that multiply in FP8: all but those at the ends; ConfigError: this network has none."""
    wanted = family_of(model.config).fp8_block
    name, ends = type(model).__name__, performance.fp8_ends
    require(wanted is not None, f"--performance.fp8: {name} has no blocks in FP8, as a DiT has; leave the flag out")
    assert wanted is not None
    problem = wanted.problem(model.config)
    require(problem is None, f"--performance.fp8: {problem}; leave the flag out, or those")
    blocks = [module for module in model.modules() if isinstance(module, wanted.__base__)]
    inner = blocks[ends : len(blocks) - ends]
    require(
        bool(inner),
        f"--performance.fp8 with {len(blocks)} blocks, of which {ends} at each end stay in bf16 "
        "(--performance.fp8_ends): none is left; leave the flag out",
    )
    _require_widths([layer for group in wanted.layers(inner[0]) for layer in group])
    tokens = wanted.rows(inner[0])
    require(
        performance.fp8_weight_gradients == "bf16" or tokens % MULTIPLE == 0,
        f"--performance.fp8_weight_gradients fp8 with {tokens} tokens per sample: FP8 products take multiples of "
        f"{MULTIPLE}; use --performance.fp8_weight_gradients bf16",
    )
    return inner


def _require_widths(layers: list[nn.Linear]) -> None:
    """Refuse a network that gains nothing, or that FP8 products do not take."""
    features = [size for layer in layers for size in (layer.in_features, layer.out_features)]
    if min(features) < LEAST or any(size % MULTIPLE for size in features):
        raise ConfigError(
            f"--performance.fp8 gains in blocks whose layers have at least {LEAST} input and output features that are "
            f"multiples of {MULTIPLE}; this network has {' and '.join(map(str, sorted(set(features))))}: leave the "
            "flag out"
        )


def convert(model: BlockwiseModel, performance: PerformanceConfig, device: torch.device) -> None:
    """Let the inner blocks multiply in FP8, in place; parameters and their names stay.

    Args:
        model: which gets ``model.scales``.
        performance: says how many blocks stay as they are, and how gradients of weights are computed.
        device: of the run.
    """
    blocks, wanted = inner_blocks(model, performance), family_of(model.config).fp8_block
    assert wanted is not None
    groups = [len(group) for group in wanted.layers(blocks[0])]
    forms_of_run = forms(weight_gradients=performance.fp8_weight_gradients == "fp8")
    model.scales = scales = DelayedScales(len(blocks), sum(groups), device, forms_of_run)
    for number, block in enumerate(blocks):
        block.__class__ = wanted
        ends = [sum(groups[: n + 1]) for n in range(len(groups))]
        block.scales = tuple(  # type: ignore[assignment]
            scales.part(number, end - size, end) for end, size in zip(ends, groups, strict=True)
        )


def require_usable(capability: tuple[int, int] | None, *, compiled: bool) -> None:
    """Raise ConfigError if a device cannot compute in FP8, or not faster; ``capability`` None: a CPU, which emulates.

    Args:
        capability: of the GPU.
        compiled: whether blocks are compiled; ops without a kernel would take several passes each.
    """
    if capability is None:
        return
    require(
        capability >= _FP8,
        f"--performance.fp8: this GPU (sm_{capability[0]}{capability[1]}) has no FP8 products, which begin with sm_89 "
        "(Ada, Hopper); leave the flag out",
    )
    require(compiled, "--performance.fp8 gains only in compiled blocks: leave out --performance.compile False, or fp8")
