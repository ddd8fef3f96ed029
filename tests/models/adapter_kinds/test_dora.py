"""DoRA: the layer against the paper in float64 and against peft's, on frozen weights of every kind."""

from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fastdiff.config.networks.pretrained import LoraConfig
from fastdiff.models.build import Model, build_model
from fastdiff.models.lora import add_lora, switch
from fastdiff.models.quantized import QuantizedLinear
from tests.models.test_lora import MODELS, adapted, inputs, relative, trainable
from tests.support.nights import by_day

TARGETS = {"dit": ("attn.qkv", "mlp.fc2"), "sd15": ("to_q", "to_out.0", "conv1", "conv", "conv_in", "conv_shortcut")}
"""Layers with and without a bias, convolutions with and without a stride."""
CONFIGS = {kind: LoraConfig(kind="dora", rank=3, alpha=5.0, targets=targets) for kind, targets in TARGETS.items()}
KINDS = by_day(["sd15"], "dit")


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Values that an adapter could have after training: B is not 0, and no magnitude is a norm any more."""
    generator = torch.Generator().manual_seed(6)
    return {
        name: value * (1.0 + 0.2 * torch.randn(value.shape, generator=generator))
        + 0.1 * torch.randn(value.shape, generator=generator) * (value.ndim > 1)
        for name, value in trainable(model).items()
    }


def trained_model(kind: str, config: LoraConfig) -> tuple[Model, dict[str, Tensor]]:
    model = adapted(MODELS[kind], config)
    values = trained(model)
    model.load_state_dict(values, strict=False)
    return model, values


def loss_of(out: Tensor) -> Tensor:
    return (out - torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).square().mean()


def frozen_of(model: nn.Module) -> dict[str, Tensor]:
    """Frozen weights under the names of the network without an adapter."""
    return {
        name.replace(".base_layer.", "."): p.detach() for name, p in model.named_parameters() if not p.requires_grad
    }


def by_the_paper(kind: str, weights: dict[str, Tensor], values: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Loss and gradients in float64, W' = m V / ||V|| with V = W + s B A in each layer, eq. 5 and section 4.3."""
    network = build_model(MODELS[kind]).double()
    leaves = {name: value.double().requires_grad_() for name, value in values.items()}
    changed = {name: value.double() for name, value in weights.items()}
    for name in values:
        if name.endswith(".lora_A"):
            layer = name.removesuffix(".lora_A")
            a, b, m = (leaves[f"{layer}.lora_{part}"] for part in ("A", "B", "magnitude_vector"))
            weight = changed[f"{layer}.weight"]
            direction = weight + scale * (b.flatten(1) @ a.flatten(1)).view(weight.shape)
            norm = direction.detach().flatten(1).square().sum(1).sqrt()
            changed[f"{layer}.weight"] = direction * (m / norm).view(-1, *[1] * (weight.ndim - 1))
    given = {
        name: value.double() if value.is_floating_point() else value for name, value in inputs(MODELS[kind]).items()
    }
    loss = loss_of(functional_call(network, changed, (), given))
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {"loss": loss.detach(), **dict(zip(leaves, gradients, strict=True))}


def found_in(model: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor]:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss = loss_of(model(**given))
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return {"loss": loss.detach(), **dict(zip(parameters, gradients, strict=True))}


def require_close(found: dict[str, Tensor], expected: dict[str, Tensor], error: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.any() or name.endswith("to_k"), name
        assert relative(found[name].double().flatten(), value.double().flatten()) < error, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_that_of_the_paper_and_of_peft(kind: str) -> None:
    config = CONFIGS[kind]
    model, values = trained_model(kind, config)
    found = found_in(model, inputs(MODELS[kind]))
    require_close(found, by_the_paper(kind, frozen_of(model), values, 5 / 3))

    network = build_model(MODELS[kind])
    network.load_state_dict(frozen_of(model), strict=False)
    layers = [name.removesuffix(".lora_A") for name in values if name.endswith(".lora_A")]
    theirs: Any = peft.LoraConfig(r=3, lora_alpha=5, target_modules=layers, use_dora=True)
    peft.inject_adapter_in_model(theirs, network)
    names = {name.replace(".default", "").removesuffix(".weight"): name for name, _ in network.named_parameters()}
    own = dict(network.named_parameters())
    with torch.no_grad():
        for name, value in values.items():
            own[names[name]].copy_(value.view(own[names[name]].shape))
    for name, p in own.items():
        p.requires_grad_("lora_" in name)
    theirs_found = found_in(network, inputs(MODELS[kind]))
    require_close(found, {"loss": theirs_found["loss"], **{name: theirs_found[names[name]] for name in values}})


@pytest.mark.parametrize("quantize", ["8bit", "4bit"])
def test_a_step_on_quantized_weights_is_that_on_their_values(quantize: Any) -> None:
    model, values = trained_model("dit", replace(CONFIGS["dit"], quantize=quantize))
    weights = frozen_of(model)
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            weights[f"{name.removesuffix('.base_layer')}.weight"] = layer.dequantized()
    require_close(found_in(model, inputs(MODELS["dit"])), by_the_paper("dit", weights, values, 5 / 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_or_switched_off_adapter_changes_no_bit(dtype: torch.dtype) -> None:
    """Each magnitude starts at the norm of its row, in bf16 too."""
    kind = "sd15"
    given = {n: v.to(dtype) if v.is_floating_point() else v for n, v in inputs(MODELS[kind]).items()}
    plain = adapted(MODELS[kind], replace(CONFIGS[kind], kind="lora")).to(dtype)
    model = adapted(MODELS[kind], CONFIGS[kind])
    for name, value in trainable(model).items():
        if name.endswith("vector"):
            weight = model.get_parameter(name.replace("lora_magnitude_vector", "base_layer.weight"))
            torch.testing.assert_close(value, weight.flatten(1).norm(dim=1), rtol=1e-6, atol=0)
    assert torch.equal(model.to(dtype)(**given), plain(**given))
    model.load_state_dict(trained(model), strict=False)
    assert not torch.allclose(model(**given), plain(**given), rtol=0.01, atol=0.01)
    switch(model, on=False)
    assert torch.equal(model(**given), plain(**given))
    switch(model, on=True)
    assert not torch.allclose(model(**given), plain(**given), rtol=0.01, atol=0.01)


def test_a_row_of_zeros_is_finite_and_trains() -> None:
    """Published networks have such rows where they start at 0; peft divides 0 by 0."""
    network = build_model(MODELS["dit"])
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.1)
    layer: Any = network.get_submodule("blocks.0.attn.qkv")
    nn.init.zeros_(layer.weight)
    add_lora(network, CONFIGS["dit"], seed=1)
    found = found_in(network, inputs(MODELS["dit"]))
    assert all(value.isfinite().all() for value in found.values())
    network.load_state_dict(trained(network), strict=False)
    assert found_in(network, inputs(MODELS["dit"]))["blocks.0.attn.qkv.lora_magnitude_vector"].any()
