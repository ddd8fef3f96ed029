"""A network in the folder layout of diffusers' ``from_pretrained``: a configuration and renamed weights."""

import importlib.metadata
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastdiff.checkpoint.safetensors_writer import write_tensors
from fastdiff.export.weights import ExportedWeights

WEIGHTS = "diffusion_pytorch_model.safetensors"


class Source(NamedTuple):
    """Origin of a diffusers weight."""

    name: str
    """Name of our parameter."""
    change: Callable[[Tensor], Tensor] = lambda tensor: tensor
    """Slices or reshapes it."""


Sources = dict[str, Source]
"""Sources by the name of the diffusers weight."""


def layer(theirs: str, ours: str, change: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Sources:
    """Map the weight and the bias of a layer; ``change`` applies to both."""
    return {f"{theirs}.{part}": Source(f"{ours}.{part}", change) for part in ("weight", "bias")}


def projections(theirs: str, ours: str, heads: int, packing: tuple[str, str]) -> Sources:
    """Split a packed projection into queries, keys and values.

    Args:
        theirs: name of the attention.
        ours: name of the projection; ``packing`` is the layout of its outputs.
        heads: of the attention.
        packing: ``("qkv", "heads")``, the queries of all heads first, or ``("heads", "qkv")``.
    """
    axis = packing.index("qkv")

    def cut(number: int) -> Callable[[Tensor], Tensor]:
        def change(packed: Tensor) -> Tensor:
            packed = packed.flatten(1) if packed.dim() > 1 else packed  # a 1x1 convolution
            sizes = (3, heads) if axis == 0 else (heads, 3)
            return packed.view(*sizes, -1, *packed.shape[1:]).select(axis, number).flatten(0, 1)

        return change

    return {
        name: source
        for number, letter in enumerate("qkv")
        for name, source in layer(f"{theirs}.to_{letter}", ours, cut(number)).items()
    }


def write_model(
    folder: Path, kind: str, config: Mapping[str, Any], sources: Sources, weights: ExportedWeights, dtype: torch.dtype
) -> None:
    """Write ``config.json`` and the weights, one tensor at a time; OSError if it cannot, as on a full disk."""
    folder.mkdir()
    content = {"_class_name": kind, "_diffusers_version": importlib.metadata.version("diffusers"), **config}
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
    read = weights.reader(dtype)
    shapes = {
        name: tuple(change(torch.empty(weights.shapes[ours], device="meta")).shape)
        for name, (ours, change) in sources.items()
    }
    write_tensors(folder / WEIGHTS, shapes, dtype, lambda name: sources[name].change(read(sources[name].name)))
