"""Linear layers of the blocks that multiply in FP8, by torchao (``--performance.fp8``).

``y = x W^T`` and ``dx = dy W`` are products of e4m3 numbers; ``dW = dy^T x`` stays in bf16. Every row of x and of dy,
and in the forward pass every row of W, has a scale of its own, a power of two; W as a whole has one for dx. So no
number of a sample depends on the others of its micro-batch, as it would with a scale for the whole of x, or with dW in
FP8, whose scales span the samples. The weights stay bf16 with fp32 masters: checkpoints are the same with and without.

A cast reads 2 bytes and writes 1 per number, and reads it once more for the scale, which the product must save. On an
H200 it does from some 2048 features on each side; a DiT-XL, with 1152, would be 3 % slower to 12 % faster.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fastdiff.errors import ConfigError, require
from fastdiff.models.blockwise import BlockwiseModel
from fastdiff.models.family import family_of
from fastdiff.optional_packages import pip_install

LEAST = 2048
"""Input and output features from which a layer gains."""
_MULTIPLE = 16
"""Divisor of the features in FP8 products."""
_FP8 = (8, 9)
"""Ada, the first capability with FP8 products."""
_RECIPE = "rowwise_with_gw_hp"
"""torchao's name of the casts above; "gw_hp": the gradient of the weight in high precision."""


def wide_layers(model: BlockwiseModel) -> list[str]:
    """Return the names of the layers that gain: wide, in a block, and working on tokens; ConfigError: there is none."""
    apart = family_of(model.config).per_sample
    blocks = {name: block for name, block in model.named_modules() if isinstance(block, model.block_classes)}
    layers = {
        f"{name}.{inner}": (layer.in_features, layer.out_features)
        for name, block in blocks.items()
        for inner, layer in block.named_modules()
        if isinstance(layer, nn.Linear) and not _is_in(block, inner, apart)
    }
    found = [name for name, features in layers.items() if min(features) >= LEAST and not any(_rest(features))]
    if not found:
        widest = max(layers.values(), key=min, default=(0, 0))
        raise ConfigError(
            f"--performance.fp8 gains in layers of at least {LEAST} input and output features that are multiples of "
            f"{_MULTIPLE}, and this network has none: its widest has {widest[0]} and {widest[1]}; leave the flag out"
        )
    return found


def convert(model: BlockwiseModel, device: torch.device) -> None:
    """Let the wide layers multiply in FP8, in place; on a CPU by fp32 products of the same numbers.

    Parameters and their names stay. ``require_usable`` says whether the device can.
    """
    names = set(wide_layers(model))
    torchao = _torchao()
    config = replace(torchao.Float8LinearConfig.from_recipe_name(_RECIPE), emulate=device.type == "cpu")
    torchao.convert_to_float8_training(model, module_filter_fn=lambda _, name: name in names, config=config)


def require_usable(capability: tuple[int, int] | None, *, compiled: bool) -> None:
    """Raise ConfigError if a device cannot compute in FP8, or not faster; ``capability`` None: a CPU, which emulates.

    Args:
        capability: of the GPU.
        compiled: whether blocks are compiled. Eager casts take several passes each, and keep weights that ZeRO-3 has
            gathered until the backward pass.
    """
    _torchao()
    if capability is None:
        return
    require(
        capability >= _FP8,
        f"--performance.fp8: this GPU (sm_{capability[0]}{capability[1]}) has no FP8 products, which begin with sm_89 "
        "(Ada, Hopper); leave the flag out",
    )
    require(compiled, "--performance.fp8 gains only in compiled blocks: leave out --performance.compile False, or fp8")


def _is_in(block: nn.Module, name: str, classes: tuple[type[nn.Module], ...]) -> bool:
    """Whether a layer of a block, or a module around it, is of one of the classes."""
    parts = name.split(".")
    return any(isinstance(block.get_submodule(".".join(parts[:n])), classes) for n in range(1, len(parts) + 1))


def _rest(features: tuple[int, int]) -> tuple[int, int]:
    return features[0] % _MULTIPLE, features[1] % _MULTIPLE


def _torchao() -> Any:
    """Import torchao, which takes seconds and of which nothing else here has need."""
    try:
        from torchao import float8
    except ImportError:
        raise ConfigError(f"--performance.fp8 needs torchao: {pip_install('torchao')}") from None
    return float8
