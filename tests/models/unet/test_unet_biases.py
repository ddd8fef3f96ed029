"""Biases of the convolutions in residual blocks: with the kernels the next norm adds them, else the convolutions."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastdiff.config.networks.pretrained import LoraConfig
from fastdiff.models.adm import blocks as adm
from fastdiff.models.lora import add_lora
from fastdiff.models.unet import blocks as unet
from fastdiff_bench.correctness.accuracy import assert_no_worse, exact
from fastdiff_kernels import dispatch
from tests.support.references import adm_networks, unet_reference
from tests.support.references.unet_reference import difference, gradients

UNETS = {
    "sd15": replace(unet_reference.SMALL["sd15"], layers_per_block=1),
    "sdxl": replace(
        unet_reference.SMALL["sdxl"], layers_per_block=1, mid_transformer_layers=1, transformer_layers=(0, 1, 1)
    ),
}
ADMS = {kind: adm_networks.SMALL[kind] for kind in ("iddpm", "adm added")}
kinds = pytest.mark.parametrize("kind", [*UNETS, *ADMS])


def built(kind: str) -> nn.Module:
    return unet_reference.built(UNETS[kind]) if kind in UNETS else adm_networks.built(ADMS[kind])


def inputs(kind: str) -> dict[str, Tensor]:
    if kind in UNETS:
        return unet_reference.inputs(UNETS[kind], 2, 4, 4)
    return adm_networks.inputs(ADMS[kind], 2, 4, 4)


class Biases(TorchDispatchMode):
    """Counts the convolutions with a bias, the sums of a gradient of one, and those by the kernel of GEGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.added = self.summed = self.gated = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.added += name == "convolution" and args[2] is not None
        self.summed += name == "convolution_backward" and args[-1][2]
        self.gated += name == "geglu_backward"
        return func(*args, **(kwargs or {}))


def _blocks(model: nn.Module) -> list[nn.Module]:
    return [each for each in model.modules() if isinstance(each, unet.ResBlock | adm.ResBlock)]


def _convolutions(module: nn.Module) -> int:
    return sum(isinstance(each, nn.Conv2d) for each in module.modules())


@kinds
def test_with_the_kernels_no_block_adds_a_bias_or_sums_its_gradient(kind: str) -> None:
    model = built(kind)
    everywhere, inside = _convolutions(model), sum(map(_convolutions, _blocks(model)))
    for backend, expected in (("reference", everywhere), ("triton", everywhere - inside)):
        with dispatch.forced(group_norm=backend), Biases() as seen:  # type: ignore[arg-type]
            gradients(model, model(**inputs(kind)))
        assert (seen.added, seen.summed) == (expected, expected), backend


@pytest.mark.parametrize("trained", [None, False], ids=["no bias", "frozen"])
def test_geglu_without_a_trained_bias_sums_none(trained: bool | None) -> None:
    layer, tokens = unet.GEGLU(8, 16), torch.randn(2, 3, 8)
    if trained is None:
        layer.proj = nn.Linear(8, 32, bias=False)
    else:
        layer.proj.bias.requires_grad_(trained)
    expected = layer(tokens)
    with dispatch.forced(group_norm="triton"):
        found = layer(tokens)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert layer.proj.weight.grad is not None
    assert layer.proj.bias is None or layer.proj.bias.grad is None


@pytest.mark.parametrize("adapter", [None, "linear"])
def test_with_the_kernels_geglu_sums_the_gradient_of_its_bias(adapter: str | None) -> None:
    model, reference = built("sd15"), built("sd15")
    layers = [name for name, each in model.named_modules() if isinstance(each, unet.GEGLU)]
    assert len(layers) > 2
    if adapter:
        for each in (model, reference):
            add_lora(each, LoraConfig(rank=2, targets=("ff.net.0.proj",)), seed=1)
    expected = gradients(reference, reference(**inputs("sd15")))
    with dispatch.forced(group_norm="triton"), Biases() as seen:
        got = gradients(model, model(**inputs("sd15")))
    assert seen.gated == len(layers)
    theirs = [name for name in got if name.startswith(tuple(layers))]
    assert sum(name.endswith("bias") for name in theirs) == (0 if adapter else len(layers))
    for name in theirs:  # those of the first halves of fresh adapters are 0
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-5 * scale)


@kinds
def test_networks_are_as_accurate_as_with_biases_in_the_convolutions(kind: str) -> None:
    def results(model: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor]:
        out = model(**given)
        found = gradients(model, out)
        return {"out": out.detach(), "gradients": torch.cat([found[name].flatten() for name in sorted(found)])}

    given = inputs(kind)
    oracle, eager = results(built(kind).double(), exact(given)), results(built(kind), given)
    with dispatch.forced(group_norm="triton"):
        ours = results(built(kind), given)
    assert_no_worse(ours, eager, oracle, sums={"gradients"})


@pytest.mark.parametrize("target", ["conv1", "conv2", "conv_shortcut"])
def test_a_layer_with_an_adapter_adds_its_own_bias(target: str) -> None:
    model, reference = built("sd15"), built("sd15")
    outside = _convolutions(model) - sum(map(_convolutions, _blocks(model)))
    for each in (model, reference):
        add_lora(each, LoraConfig(rank=2, targets=(target,)), seed=1)  # type: ignore[arg-type]
    expected = reference(**inputs("sd15"))
    with dispatch.forced(group_norm="triton"), Biases() as seen:
        got = model(**inputs("sd15"))
    assert difference(got, expected) < 1e-5
    adapted = sum(hasattr(each, "base_layer") for each in model.modules())
    assert adapted > 2
    assert seen.added == outside + adapted
