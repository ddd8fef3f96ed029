"""LoRA on our networks, and its quantised base."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.pretrained import LoraConfig
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.output import OutputConfig
from fastdiff.errors import ConfigError
from fastdiff.export.formats import formats_of
from fastdiff.export.run import Choice, _checked
from fastdiff.models.blockwise import BlockwiseModel
from fastdiff.models.build import Model, build_model
from fastdiff.models.family import ModelFamily
from fastdiff.models.lora import add_lora
from fastdiff.models.pretrained.tiny_pipeline import UNETS
from fastdiff.models.quantized import QuantizedLinear
from tests.support.nights import by_day

DIT = DiTConfig(depth=2, hidden=32, heads=2, patch=2, channels=4, size=8, classes=10)
ONE_LEVEL = replace(UNETS["sd15"], block_out_channels=(32,), attention_heads=(4,), transformer_layers=(1,))
"""The fewest shapes of blocks, of which each is compiled once."""
MODELS: dict[str, ModelConfig] = {"dit": DIT, "sd15": UNETS["sd15"], "sdxl": UNETS["sdxl"]}


def adapted(model: ModelConfig, config: LoraConfig, seed: int = 1, **options: Any) -> Model:
    """A network with random weights everywhere and an adapter on it."""
    network = build_model(model, **options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    add_lora(network, config, seed=seed)
    return network


def trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Weights that an adapter could have after training: B is not 0."""
    generator = torch.Generator().manual_seed(6)
    return {name: 0.3 * torch.randn(p.shape, generator=generator) for name, p in trainable(model).items()}


def inputs(model: ModelConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    found = {"noisy": torch.randn(2, 4, 8, 8, generator=generator), "time": torch.tensor([7, 800])}
    if isinstance(model, DiTConfig):
        return found | {"label": torch.tensor([1, 5])}
    found["context"] = torch.randn(2, 9, model.cross_attention_dim, generator=generator)
    if model.pooled_dim:
        found["pooled"] = torch.randn(2, model.pooled_dim, generator=generator)
        found["time_ids"] = torch.tensor([[32.0, 32, 0, 0, 32, 32], [40, 32, 4, 0, 32, 32]])
    return found


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


def gradients(model: nn.Module, given: Mapping[str, Tensor]) -> list[Tensor]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad(model(**given).square().sum(), parameters))


@pytest.mark.parametrize("kind", MODELS)
def test_a_fresh_adapter_changes_nothing_and_alone_is_trained(kind: str) -> None:
    plain, model = build_model(MODELS[kind]), build_model(MODELS[kind])
    add_lora(model, LoraConfig(rank=3), seed=1)
    given = inputs(MODELS[kind])
    assert torch.equal(model(**given), plain(**given))
    layers = {"dit": 2 * 2, "sd15": 4 * 2 * 4, "sdxl": 4 * 2 * 2 * 4}[kind]
    weights = trainable(model)
    assert len(weights) == 2 * layers, "A and B of every projection of every attention"
    assert all("lora_" in name and p.dtype == torch.float32 and 3 in p.shape for name, p in weights.items())


def test_the_adapter_adds_the_scaled_product_of_its_matrices() -> None:
    """W x + b + alpha / rank * B A x, eq. 3 of the paper."""
    model = adapted(DIT, LoraConfig(rank=2, alpha=5.0, targets=("mlp.fc1",)))
    layer = model.get_submodule("blocks.1.mlp.fc1")
    a, b = (p for p in layer.parameters() if p.requires_grad)
    nn.init.normal_(b)
    x = torch.randn(3, 32)
    base = layer.get_submodule("base_layer")
    assert torch.allclose(layer(x), base(x) + 2.5 * x @ a.T @ b.T, atol=1e-5)


def test_initial_values_depend_on_the_seed_alone() -> None:
    first = trainable(adapted(DIT, LoraConfig(rank=4)))
    torch.manual_seed(99)
    before = torch.get_rng_state()
    again, other, high = (trainable(adapted(DIT, LoraConfig(rank=4), seed=seed)) for seed in (1, 2, 1 + 2**63))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(again[name], value) for name, value in first.items())
    downs = [name for name in first if "lora_A" in name]
    assert not any(torch.equal(other[name], first[name]) or torch.equal(high[name], first[name]) for name in downs)
    values = torch.cat([first[name].flatten() for name in downs])
    assert float(values.std()) == pytest.approx(1 / 4, rel=0.1)
    assert all(not first[name].any() for name in first if "lora_B" in name)


@pytest.mark.parametrize("quantize", ["none", "4bit"])
def test_trained_weights_are_restored(quantize: Any) -> None:
    config = LoraConfig(rank=2, quantize=quantize)
    model = adapted(DIT, config)
    weights = trained(model)
    restored = build_model(DIT)
    add_lora(restored, config, seed=8, weights=weights)
    found = trainable(restored)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], value) for name, value in weights.items())


def test_weights_of_another_adapter_are_refused() -> None:
    weights = trained(adapted(DIT, LoraConfig(rank=2)))
    few = dict(list(weights.items())[1:])
    for config, given in (
        (LoraConfig(rank=3), weights),
        (LoraConfig(rank=2, targets=("mlp.fc1",)), weights),
        (LoraConfig(rank=2), few),
        (LoraConfig(rank=2), {**weights, "blocks.7.lora_A.default.weight": torch.zeros(1)}),
    ):
        with pytest.raises(ConfigError, match=r"another adapter: blocks\.\d.*--lora.rank"):
            add_lora(build_model(DIT), config, seed=1, weights=given)


def test_bad_options_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(DIT)
    with pytest.raises(ConfigError, match=r"--lora.targets to_q: .* fc1, fc2, linear, mlp.0, mlp.2, proj, qkv$"):
        add_lora(model, LoraConfig(rank=2, targets=("to_q",)), seed=1)
    with pytest.raises(ConfigError, match=r"--lora.targets fc: "):
        add_lora(model, LoraConfig(rank=2, targets=("fc",)), seed=1)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match="pip install 'peft>="):
        add_lora(model, LoraConfig(rank=2), seed=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "error", "size"), [(8, 0.015, 0.51), (4, 0.11, 0.29)])
def test_a_quantized_layer_is_near_and_small(bits: Any, error: float, size: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    linear = nn.Linear(320, 96)
    nn.init.normal_(linear.weight, std=0.02, generator=generator)
    with torch.no_grad():
        linear.weight[5] = 0.0  # adaLN starts with such rows, and 0 must stay 0
    x = torch.randn(7, 320, generator=generator).to(dtype).requires_grad_()
    expected = linear(x.detach().float()).detach()
    layer = QuantizedLinear(linear, bits).to(dtype)
    assert {t.dtype for t in layer.buffers()} == {torch.uint8, torch.int8 if bits == 8 else torch.uint8}
    stored = sum(t.numel() * t.element_size() for t in layer.buffers())
    assert stored < size * 2 * linear.weight.numel()
    out = layer(x)
    assert out.dtype == dtype
    assert relative(out.float(), expected) < error
    assert torch.equal(out[:, 5], layer.bias[5].expand(7))
    upstream = torch.randn(7, 96, generator=generator).to(dtype)
    (gradient,) = torch.autograd.grad(out, x, upstream)
    matrix = layer(torch.eye(320, dtype=dtype)) - layer(torch.zeros(1, 320, dtype=dtype))  # the weight in use
    rounding = 1e-5 if dtype == torch.float32 else 0.02
    assert relative(gradient.float(), (upstream.float() @ matrix.float().T)) < rounding


def test_the_dequantized_weight_is_not_kept_for_the_backward_pass() -> None:
    layer = QuantizedLinear(nn.Linear(64, 64), 4)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel() * t.element_size()) or t, lambda t: t
    ):
        layer(torch.randn(2, 64, requires_grad=True)).sum()
    assert sum(kept) == 64 * 64 // 2 + 64 * 64 // 64 * 4


@pytest.mark.parametrize(
    ("kind", "quantize", "error"),
    by_day(
        [("dit", "8bit", 0.03), ("sdxl", "4bit", 0.3)],
        *(("dit", "4bit", 0.3), ("sd15", "8bit", 0.03), ("sd15", "4bit", 0.3), ("sdxl", "8bit", 0.03)),
    ),
)
def test_a_quantized_base_trains_the_same_adapter(kind: str, quantize: Any, error: float) -> None:
    model = MODELS[kind]
    exact, near = (adapted(model, LoraConfig(rank=2, quantize=q)) for q in ("none", quantize))
    weights = trained(exact)
    for network in (exact, near):
        network.load_state_dict(weights, strict=False)
    linears = [n for n, m in near.named_modules() if type(m) is nn.Linear and "blocks." in n and "lora_" not in n]
    assert not [name for name in linears if "transformer_blocks" in name or kind == "dit"]
    given = inputs(model)
    assert 0 < relative(near(**given), exact(**given)) < error
    pairs = list(zip(gradients(near, given), gradients(exact, given), strict=True))
    found, expected = (torch.cat([pair[n].flatten() for pair in pairs]) for n in (0, 1))
    assert relative(found, expected) < 3 * error


@dataclass(frozen=True, kw_only=True, slots=True)
class LayersConfig(ModelConfig):
    """A network of another package, whose blocks have a name of its own."""

    kind: Literal["layers"] = "layers"
    channels: int = 1
    size: int = 8

    family: ClassVar[str] = f"{__name__}:LAYERS"
    title: ClassVar[str] = "a network of layers"
    lora_targets: ClassVar[tuple[str, ...]] = ("first",)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)


class Layers(BlockwiseModel):
    block_classes = (Layer,)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.layers, self.out = nn.ModuleList([Layer(), Layer()]), nn.Linear(64, 64)


LAYERS = ModelFamily(
    config=LayersConfig,
    build=lambda config, /, **options: Layers(config),
    multiply_adds=lambda config: 0.0,
    input_multiply_adds=lambda config: 0.0,
    subject=lambda config: "Layers",
)


def test_the_blocks_of_a_network_of_another_package_are_quantized() -> None:
    model = adapted(LayersConfig(), LoraConfig(rank=2, quantize="4bit"))
    quantized = [name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)]
    assert quantized == [f"layers.{n}.{name}" for n in (0, 1) for name in ("first.base_layer", "second")]


def test_an_adapter_that_is_not_there_is_not_recommended() -> None:
    """The first format of such a network is the adapter."""
    assert next(iter(formats_of(LayersConfig))) == "lora"
    config = RunConfig(model=LayersConfig(), output=OutputConfig(sample_every=0))
    with pytest.raises(ConfigError, match=r"the run trained all weights and has no adapter; use safetensors"):
        _checked(Choice(format="lora"), config.model, config.lora)
