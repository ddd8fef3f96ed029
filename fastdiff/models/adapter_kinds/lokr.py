"""LoKr (LyCORIS, Yeh et al. 2023, arXiv:2309.14859): ``W x + b`` becomes ``W x + b + s (w1 kron w2) x``."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from fastdiff.config.networks.pretrained import LoraConfig
from fastdiff.errors import ConfigError, require
from fastdiff.models.adapter_files.forms import DIFFUSERS, Form
from fastdiff.models.adapter_files.kronecker import Factor, Kronecker, product, without_core
from fastdiff.models.adapter_files.readers import DIFFUSERS_READER, Reader
from fastdiff.models.adapter_kinds.kind import AdapterKind, FileLayer, metadata_of_lora
from fastdiff.models.adapter_kinds.kronecker_layer import KroneckerLayer, KroneckerShape, divided
from fastdiff.models.build import Model

_NAMES = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")
_MATRICES = (*_NAMES, "lokr_t2")
_IN_DIFFUSERS = ("Flux2Transformer2DModel", "ZImageTransformer2DModel")
"""Classes whose pipelines read LoKr; those of the others refuse keys without ``lora`` in them."""


def shape_of(config: LoraConfig) -> KroneckerShape:
    """Return what determines the shapes of the factors."""
    return KroneckerShape(
        rank=config.rank,
        factor=-1 if config.factor is None else config.factor,
        full_matrix=config.full_matrix,
        decompose_both=config.decompose_both,
    )


def _inject(model: Model, config: LoraConfig, layers: list[str]) -> None:
    for name in layers:
        parent, _, child = name.rpartition(".")
        base = cast(nn.Linear | nn.Conv2d, model.get_submodule(name))
        if isinstance(base, nn.Conv2d) and (base.groups > 1 or base.padding_mode != "zeros"):
            raise ValueError("a LoKr is for convolutions without groups and padded by zeros")
        setattr(model.get_submodule(parent), child, KroneckerLayer(base, shape_of(config), config.numerator))


def change_of(parameters: Mapping[str, Tensor], config: LoraConfig) -> Kronecker:
    """Return the change of a layer from its factors."""
    return _change({end.removeprefix("."): value for end, value in parameters.items()}, config.numerator)


def _change(matrices: Mapping[str, Tensor], alpha: float) -> Kronecker:
    first, second = (_factor(matrices, name) for name in ("lokr_w1", "lokr_w2"))
    return Kronecker(first, second, alpha)


def _factor(matrices: Mapping[str, Tensor], name: str) -> Factor:
    return (matrices[name],) if name in matrices else (matrices[f"{name}_a"], matrices[f"{name}_b"])


def start(parameters: Mapping[str, Tensor], change: Kronecker, config: LoraConfig) -> None:
    """Give the factors the values of a change that ``fitted`` allows; another scale goes into the second one."""
    own = change_of(parameters, config)
    left, *right = change.second
    scale = change.scale / own.scale
    with torch.no_grad():
        _fill(own.first, change.first)
        _fill(own.second, (left, right[0] * scale) if right else (left * scale,))


def _fill(own: Factor, values: Factor) -> None:
    """Set a factor, in place; columns of its first matrix above the rank of the values stay as they are drawn."""
    if len(own) == 1:
        own[0].copy_(product(values).view_as(own[0]))
        return
    rank = len(values[1])
    own[0][:, :rank] = values[0]
    own[1].zero_()
    own[1][:rank] = values[1]


def fitted(config: LoraConfig, changes: Mapping[str, Kronecker], weights: Mapping[str, tuple[int, ...]]) -> LoraConfig:
    """Return the configuration with the options by which factors have the shapes of a file's.

    Raises:
        ConfigError: no factor divides all layers as the file does.
    """
    products = [change for change in changes.values() if change.rank]
    config = replace(
        config,
        full_matrix=config.full_matrix or not products,
        decompose_both=config.decompose_both or any(len(change.first) > 1 for change in products),
    )
    if config.alpha is None and len({change.scale for change in products}) == 1 and products[0].scale > 0:
        config = replace(config, alpha=products[0].scale * config.rank)
    rows = sorted({max(change.rows[0], change.columns[0]) for change in changes.values()})
    tried = [-1, *rows] if config.factor is None else [config.factor]
    misfits = {factor: _misfits(replace(config, factor=factor), changes, weights) for factor in tried}
    best = min(tried, key=lambda factor: len(misfits[factor]))
    if misfits[best]:
        layer = misfits[best][0]
        (a, c), (b, d) = changes[layer].rows, changes[layer].columns
        given = "every --lora.factor" if config.factor is None else f"--lora.factor {config.factor}"
        raise ConfigError(
            f"--lora.init {config.init}: {given} with --lora.rank {config.rank} makes other factors than "
            f"{len(misfits[best])} of its {len(changes)} layers have: {layer} is [{a}, {b}] kron [{c}, {d}], rank "
            f"{changes[layer].rank or 'full'}; leave both out, or give --lora.full_matrix where only the ranks differ"
        )
    return replace(config, factor=best)


def _misfits(config: LoraConfig, changes: Mapping[str, Kronecker], weights: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the layers whose factors cannot take the values of their changes."""
    return [layer for layer, change in changes.items() if not _fits(shape_of(config).of(weights[layer]), change)]


def _fits(shapes: Mapping[str, Sequence[int]], change: Kronecker) -> bool:
    own = _change({name: torch.empty(shape, device="meta") for name, shape in shapes.items()}, 1.0)
    pairs = ((own.first, change.first), (own.second, change.second))
    return (own.rows, own.columns) == (change.rows, change.columns) and all(
        len(ours) == 1 or (len(theirs) == 2 and len(theirs[1]) <= len(ours[1])) for ours, theirs in pairs
    )


def read(layer: FileLayer) -> Kronecker:
    """Return the change of a layer in a file."""
    found = dict(layer.tensors)
    core = found.pop("lokr_t2", None)
    for name in ("lokr_w1", "lokr_w2"):
        missing = [f"{name}{end}" for end in ("_a", "_b") if f"{name}{end}" not in found]
        require(name in found or not missing, f"{layer.key} has no {name}, nor {' and '.join(missing)} in its place")
    change = _change(found, 1.0)
    if core is not None:
        require(len(change.second) == 2, f"{layer.key} has lokr_t2 without lokr_w2_a and lokr_w2_b")
        change = replace(change, second=without_core(core, *change.second))
    _require_shape(layer, change)
    if len(change.second) == 1:
        rows, columns = change.rows[1], layer.shape[1] // change.columns[0]
        change = replace(change, second=(change.second[0].reshape(rows, columns, *layer.shape[2:]),))
    alpha = layer.tensors.get("alpha")
    if alpha is not None:
        return replace(change, alpha=alpha.item() or float(change.rank))
    if change.rank:
        return replace(change, alpha=layer.alpha(change.rank))
    return replace(change, second=(change.second[0] * _scale_of_peft(layer),))


def _scale_of_peft(layer: FileLayer) -> float:
    """Return the scale of whole factors: alpha / rank in peft, by the configuration of the file; 1 without one."""
    config: dict[str, Any] = json.loads(layer.metadata.get("lora_adapter_metadata", "{}"))
    rank = next((value for name, value in config.items() if name.rpartition(".")[2] == "r"), 1)
    return layer.alpha(rank) / rank


def _require_shape(layer: FileLayer, change: Kronecker) -> None:
    outputs, inputs, *kernel = layer.shape
    (a, c), (b, d) = change.rows, change.columns
    apart = (change.first, change.second)
    size = torch.Size(layer.shape[1:]).numel()
    require(
        a * c == outputs and b * d == size and inputs % b == 0
        and all(len(factor) == 1 or factor[0].shape[1] == len(factor[1]) for factor in apart),
        f"{layer.key} is [{a}, {b}] kron [{c}, {d}], expected a product of {[outputs, inputs, *kernel]}; the file is "
        f"of another network than {layer.network} of this size",
    )  # fmt: skip


def metadata(form: Form, part: str, config: LoraConfig, layers: Sequence[str]) -> dict[str, str]:
    """Return the metadata of a file: kohya's of the rank; diffusers finds the shapes of LoKr in the tensors alone."""
    if form == DIFFUSERS:
        return {}
    own = {"ss_network_module": LOKR.network_module, "ss_network_args": '{"algo": "lokr"}'}
    return metadata_of_lora(form, part, config, layers, **own)


def refused_by(reader: Reader, form: Form, diffusers_class: str) -> bool:
    """Whether a program fails at its files; diffusers does but for two classes under its own names."""
    return reader == DIFFUSERS_READER and not (form == DIFFUSERS and diffusers_class in _IN_DIFFUSERS)


def unreadable(reader: Reader, changes: Mapping[str, Kronecker]) -> str:
    """Return why diffusers would not load these changes: it looks for one factor, by which peft divides every layer.

    Source: ``_create_lokr_config`` in utils/peft_utils.py of diffusers 0.42.1.
    """
    if reader != DIFFUSERS_READER:
        return ""
    sizes = [pair for change in changes.values() for pair in zip(*_sides(change), strict=True)]
    factors = [-1, *sorted({change.rows[0] for change in changes.values()})]
    for factor in factors:
        if all(_divided_by_peft(small * large, factor) == (small, large) for small, large in sizes):
            return ""
    return (
        "it looks for one factor that divides every layer, and none is the factor of all; use --format lora-native for "
        "ComfyUI, or train with --lora.factor -1"
    )


def _sides(change: Kronecker) -> tuple[tuple[int, int], tuple[int, int]]:
    return (change.rows[0], change.columns[0]), (change.rows[1], change.columns[1])


def _divided_by_peft(size: int, factor: int) -> tuple[int, int]:
    """Return how peft 0.21 divides a size: as LyCORIS, but the factor comes first even where it is the larger one."""
    return (factor, size // factor) if factor > 0 and size % factor == 0 else divided(size, factor)


def size(config: LoraConfig) -> str:
    """Return the size of the factors in words, with alpha unless all are whole."""
    divisor = "" if config.factor in (None, -1) else f", factor {config.factor}"
    if config.full_matrix:
        return f"full factors{divisor}"
    both = ", both factors" if config.decompose_both else ""
    return f"rank {config.rank}{divisor}{both}, alpha {config.numerator:g}"


LOKR = AdapterKind(
    title="LoKr",
    inject=_inject,
    parameters=tuple(f".{name}" for name in _NAMES),
    change=change_of,
    start=start,
    spellings={
        **{f".{name}": name for name in _MATRICES},
        **{f".{name}.default": name for name in _MATRICES},  # peft
        ".alpha": "alpha",
    },
    expected="lokr_w1 and lokr_w2, or _a and _b of each, and alpha at most",
    read=read,
    size=size,
    fitted=fitted,
    metadata=metadata,
    network_module="lycoris.kohya",
    formula="A layer changes by the Kronecker product of `lokr_w1` and `lokr_w2`; either may be stored as `_a` and "
    "`_b`, whose product it is. The scale is in the first.",
    unreadable=unreadable,
    refused_by=refused_by,
)
