"""The layers of LoKr: what they add, their gradients, their sizes, and the layers that they stand on."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastdiff.models.adapter_kinds.kronecker_layer import KroneckerLayer, KroneckerShape, divided
from fastdiff.models.embeddings import PatchConv2d
from fastdiff.models.quantized import QuantizedLinear
from tests.support.inputs.kronecker import ALPHA, SHAPES, change

BASES: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(24, 40), (2, 5, 24)),
    "convolution": (lambda: nn.Conv2d(16, 20, 3, stride=2, padding=1), (2, 16, 7, 9)),
    "patches": (lambda: PatchConv2d(4, 48, 2, stride=2), (2, 4, 8, 6)),
}


def layer_of(base: str, shape: KroneckerShape) -> tuple[Any, KroneckerLayer, Tensor]:
    """A base, a layer with random matrices on it, and inputs; float64."""
    torch.manual_seed(1)
    module, size = BASES[base]
    plain = module().double()
    layer = KroneckerLayer(plain, shape, ALPHA).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return plain, layer, torch.randn(size, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("base", BASES)
def test_outputs_and_gradients_are_those_of_the_changed_weight(base: str, shape: str) -> None:
    plain, layer, x = layer_of(base, SHAPES[shape])
    names = [name for name, _ in layer.named_parameters(recurse=False)]
    parameters = [x, *(p for _, p in layer.named_parameters(recurse=False))]
    out = layer(x)
    delta = change(dict(layer.named_parameters(recurse=False)), ALPHA, plain.weight.shape)
    changed = {"weight": plain.weight + delta, "bias": plain.bias}
    expected = torch.func.functional_call(plain, changed, (x,))
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    upstream = torch.randn_like(out)
    found, theirs = (torch.autograd.grad(value, parameters, upstream) for value in (out, expected))
    for name, ours, reference in zip(["x", *names], found, theirs, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-9, msg=name)
    layer.enable_adapters(False)
    assert torch.equal(layer(x), plain(x))


@pytest.mark.parametrize("shape", ["w2 a product", "both products"])
@pytest.mark.parametrize("base", ["linear", "convolution"])
def test_it_is_the_layer_of_peft(base: str, shape: str) -> None:
    """With equal matrices, named alike; peft's has them by the name of the adapter."""
    from peft import LoKrConfig, inject_adapter_in_model

    sizes = SHAPES[shape]
    plain, layer, x = layer_of(base, sizes)
    config = LoKrConfig(
        r=sizes.rank, alpha=ALPHA, decompose_factor=sizes.factor, decompose_both=sizes.decompose_both,  # type: ignore[arg-type]
        target_modules=["0"],
    )  # fmt: skip
    theirs = inject_adapter_in_model(config, nn.Sequential(plain)).double()
    own = dict(layer.named_parameters(recurse=False))
    peft = {name.split(".")[1]: p for name, p in theirs.named_parameters() if "lokr" in name}
    assert {name: p.shape for name, p in peft.items()} == {name: p.shape for name, p in own.items()}
    with torch.no_grad():
        for name, parameter in peft.items():
            parameter.copy_(own[name])
    out, expected = layer(x), theirs(x)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    found = torch.autograd.grad(out.square().sum(), list(own.values()))
    reference = torch.autograd.grad(expected.square().sum(), [peft[name] for name in own])
    torch.testing.assert_close(found, reference, rtol=1e-9, atol=1e-9)


def test_a_fresh_layer_changes_nothing_and_learns() -> None:
    for shape in SHAPES.values():
        plain = nn.Linear(24, 40)
        layer, x = KroneckerLayer(plain, shape, ALPHA), torch.randn(3, 24)
        assert torch.equal(layer(x), plain(x))
        second = next(p for name, p in layer.named_parameters() if name in ("lokr_w2", "lokr_w2_b"))
        layer(x).square().sum().backward()
        assert second.grad is not None
        assert second.grad.norm() > 0


def test_sizes_are_divided_as_lycoris_divides_them() -> None:
    """peft has the function of LyCORIS as it was before that put the smaller number first in every case."""
    from peft.tuners.lokr.layer import factorization

    for size in (*range(1, 130), 320, 360, 640, 1280, 3072, 9216, 27648):
        for factor in (-1, *range(1, 33)):
            assert divided(size, factor) == tuple(sorted(factorization(size, factor))), (size, factor)
    assert (divided(360, 16), divided(16, 8), divided(127, 8)) == ((15, 24), (2, 8), (1, 127))


def test_a_quantized_base_and_few_saved_values() -> None:
    """No product of the factors is kept for the backward pass, and the base needs no weight."""
    shape = KroneckerShape(rank=4, factor=8)
    layer = KroneckerLayer(nn.Linear(256, 256), shape, ALPHA)
    layer.base_layer = QuantizedLinear(layer.base_layer.requires_grad_(False), 8)
    nn.init.normal_(layer.lokr_w2_b)
    x, kept = torch.randn(2, 256, requires_grad=True), list[int]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        out = layer(x)
    assert max(kept) <= math.prod(layer.base_layer.packed.shape)
    assert sum(size for size in kept if size != 256 * 256) < 4096
    assert not torch.equal(out, layer.base_layer(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_computes_in_the_dtype_of_its_matrices(dtype: torch.dtype) -> None:
    layer = KroneckerLayer(nn.Linear(16, 16).to(dtype), KroneckerShape(rank=2, factor=4), ALPHA)
    assert layer(torch.randn(2, 16, dtype=dtype)).dtype == dtype
    layer = layer.to(dtype)
    assert torch.compile(layer, fullgraph=True, backend="eager")(torch.randn(2, 16, dtype=dtype)).dtype == dtype
