"""Random LoKr adapters, and what they change by the definition of the product."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fastdiff.models.adapter_files.kronecker import Kronecker
from fastdiff.models.adapter_files.native_names import NamedNetwork
from fastdiff.models.adapter_kinds.kronecker_layer import KroneckerShape

SHAPES = {
    "w2 a product": KroneckerShape(rank=2, factor=4),
    "both products": KroneckerShape(rank=1, factor=-1, decompose_both=True),
    "w1 alone a product": KroneckerShape(rank=1, factor=4, decompose_both=True),
    "whole by the rank": KroneckerShape(rank=99, factor=4),
    "whole": KroneckerShape(rank=2, factor=2, full_matrix=True),
}
ALPHA = 3.0


def adapter(
    names: NamedNetwork, shape: KroneckerShape, alpha: float = ALPHA, layers: Iterable[str] | None = None
) -> dict[str, Kronecker]:
    """Return a random adapter of every layer, or of some."""
    generator, found = torch.Generator().manual_seed(5), {}
    for layer in names.layers if layers is None else layers:
        matrices = {
            name: torch.randn(size, generator=generator) for name, size in shape.of(names.layers[layer]).items()
        }
        factors = [
            tuple(value for key, value in matrices.items() if key.startswith(name)) for name in ("lokr_w1", "lokr_w2")
        ]
        found[layer] = Kronecker(*factors, alpha)
    return found


def change(matrices: Mapping[str, Tensor], alpha: float, shape: tuple[int, ...]) -> Tensor:
    """Return the change of a weight by the matrices of a layer, by LyCORIS' names: block after block, in float64."""
    found = {name: value.double() for name, value in matrices.items()}
    products = [name for name in ("lokr_w1", "lokr_w2") if name not in found]
    first, second = (
        found[f"{name}_a"] @ found[f"{name}_b"] if name in products else found[name].flatten(1)
        for name in ("lokr_w1", "lokr_w2")
    )
    scale = alpha / len(found[f"{products[-1]}_b"]) if products else 1.0
    rows = [torch.cat([first[i, j] * second for j in range(first.shape[1])], 1) for i in range(len(first))]
    return scale * torch.cat(rows).view(shape)
