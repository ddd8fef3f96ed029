"""LoRA (Hu et al. 2021, arXiv:2106.09685), with the layers of peft: ``W x + b`` becomes ``W x + b + s B A x``."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastdiff.config.networks.pretrained import LoraConfig
from fastdiff.errors import ConfigError, require
from fastdiff.models.adapter_files.low_rank import LowRank
from fastdiff.models.adapter_kinds.kind import AdapterKind, FileLayer
from fastdiff.models.build import Model
from fastdiff.optional_packages import pip_install

DOWN, UP = ".lora_A.default.weight", ".lora_B.default.weight"
"""Ends of the names of A and B, as peft calls them."""
_ADAPTER = "default"


def _inject(model: Model, config: LoraConfig, layers: list[str]) -> None:
    try:
        import peft
    except ImportError:
        raise ConfigError(f"--lora.rank needs peft, which is not installed: {pip_install('peft')}") from None
    adapter: Any = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.numerator,  # type: ignore[arg-type]  # peft divides it by r; a float works
        target_modules=layers,
        init_lora_weights="gaussian",
    )
    peft.inject_adapter_in_model(adapter, model, adapter_name=_ADAPTER)


def change_of(parameters: Mapping[str, Tensor], config: LoraConfig) -> LowRank:
    """Return the change of a layer from A and B."""
    return LowRank(parameters[DOWN], parameters[UP], config.numerator)


def start(parameters: Mapping[str, Tensor], change: LowRank, config: LoraConfig) -> None:
    """Give A and B the values of a change, whose rank is no higher; another scale goes into B."""
    with torch.no_grad():
        parameters[DOWN][: change.rank] = change.down
        parameters[UP][:, : change.rank] = change.up * (change.scale / (config.numerator / config.rank))


def read(layer: FileLayer) -> LowRank:
    """Return the change of a layer in a file."""
    missing = [name for name in ("down", "up") if name not in layer.tensors]
    require(not missing, f"{layer.key} has no matrix {' and '.join(missing)}")
    down, up = layer.tensors["down"], layer.tensors["up"]
    rows, *inputs = layer.shape
    require(
        up.ndim > 1 and down.ndim > 1 and (len(up), up.flatten(1).shape[1]) == (rows, len(down))
        and math.prod(down.shape[1:]) == math.prod(inputs),
        f"{layer.key} is {list(up.shape)} times {list(down.shape)}, expected [{rows}, rank] times "
        f"[rank, {', '.join(map(str, inputs))}]; the file is of another network than {layer.network} of this size",
    )  # fmt: skip
    down, up = down.reshape(-1, *inputs), up.reshape(len(up), -1, *[1] * (len(inputs) - 1))
    alpha = layer.alpha(len(down))
    if (beside := layer.tensors.get("alpha")) is not None:
        alpha = beside.item() or float(len(down))
    return LowRank(down, up, alpha)


SPELLINGS: Mapping[str, str] = {
    ".lora_down.weight": "down", ".lora_up.weight": "up",  # kohya
    ".lora_A.weight": "down", ".lora_B.weight": "up",  # peft, without the name of the adapter
    DOWN: "down", UP: "up",  # peft
    ".lora.down.weight": "down", ".lora.up.weight": "up",  # diffusers of old
    "_lora.down.weight": "down", "_lora.up.weight": "up",  # its attention processors
    ".lora_linear_layer.down.weight": "down", ".lora_linear_layer.up.weight": "up",
    ".alpha": "alpha",
}  # fmt: skip
"""Ends of keys, and what the tensor is."""

LORA = AdapterKind(
    title="LoRA",
    inject=_inject,
    parameters=(DOWN, UP),
    change=change_of,
    start=start,
    spellings=SPELLINGS,
    expected="A and B of each layer, and alpha at most",
    read=read,
)
