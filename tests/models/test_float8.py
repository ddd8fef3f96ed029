"""FP8 layers, emulated on the CPU: which, when refused, independent of the batch, and a training beside bf16."""

import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.pretrained import LoraConfig, PretrainedConfig
from fastdiff.config.optimizers.adamw import AdamWConfig
from fastdiff.config.presets import preset
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.errors import ConfigError
from fastdiff.models import float8
from fastdiff.models.build import build_model
from fastdiff.models.kernel_choice import choices, in_words
from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from tests.support.forked import forked_ranks, values
from tests.support.runs import launch, losses, newest, tiny

CPU = torch.device("cpu")
WIDE = DiTConfig(depth=1, hidden=256, heads=4, patch=2, channels=1, size=8, classes=10)
"""A DiT whose layers are wide once the limit is 256."""


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "LEAST", 256)


def test_only_wide_layers_on_tokens_are_converted() -> None:
    with torch.device("meta"):
        model = build_model(replace(WIDE, depth=2, hidden=2048, heads=16))
    names = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    expected = [f"blocks.{n}.{name}" for n in (0, 1) for name in names]
    before = {name: p.shape for name, p in model.named_parameters()}
    assert float8.wide_layers(model) == expected
    float8.convert(model, CPU)
    assert [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"] == expected
    assert {name: p.shape for name, p in model.named_parameters()} == before


@pytest.mark.parametrize(("name", "widest"), [("dit-xl-2-256", "1152 and 3456"), ("sd2-512", "1280 and 1280")])
def test_a_network_that_gains_nothing_is_refused(name: str, widest: str) -> None:
    config = replace(preset(name), performance=PerformanceConfig(fp8=True))
    with pytest.raises(ConfigError, match=rf"at least 2048 .* none: its widest has {widest}; leave the flag out"):
        choices(config, CPU)


def test_devices_that_gain_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"this GPU \(sm_86\) has no FP8 products, which begin with sm_89"):
        float8.require_usable((8, 6), compiled=True)
    with pytest.raises(ConfigError, match="gains only in compiled blocks"):
        float8.require_usable((9, 0), compiled=False)
    float8.require_usable((8, 9), compiled=True)
    float8.require_usable(None, compiled=False)


def test_other_dtypes_and_adapters_are_refused() -> None:
    with pytest.raises(ConfigError, match="FP8 layers are part of a network in bf16"):
        PerformanceConfig(fp8=True, precision="fp16")
    given = {"lora": LoraConfig(rank=4), "pretrained": PretrainedConfig(path="pipeline", weights=True)}
    with pytest.raises(ConfigError, match="the adapted layers are frozen"):
        replace(preset("sd15-finetune"), performance=PerformanceConfig(fp8=True), **given)


class Count(TorchDispatchMode):
    """Counts casts to FP8 and their numbers, and the scaled products."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.float8_e4m3fn and func is torch.ops.aten._to_copy.default:
            self.found["casts"] += 1
            self.found["numbers"] += out.numel()
        if func is torch.ops.aten.mm.default:
            self.found["products"] += 1
        return out


def layer(narrow: None) -> nn.Module:
    torch.manual_seed(0)
    model = build_model(WIDE).bfloat16()
    float8.convert(model, CPU)
    return model.get_submodule("blocks.0.mlp.fc1")


def test_a_sample_does_not_depend_on_its_batch(narrow: None) -> None:
    """One outlier would change the scale of every other sample, were there one for the whole batch."""
    fc1 = layer(narrow)
    x = torch.randn(4, 16, 256, dtype=torch.bfloat16)
    x[3] *= 1000
    upstream = torch.randn(4, 16, 1024, dtype=torch.bfloat16)

    def run(part: slice) -> tuple[Tensor, Tensor]:
        given = x[part].clone().requires_grad_()
        out = fc1(given)
        out.backward(upstream[part])
        assert given.grad is not None
        return out.detach(), given.grad

    whole = run(slice(0, 4))
    for n in range(4):
        alone = run(slice(n, n + 1))
        assert torch.equal(alone[0], whole[0][n : n + 1])
        assert torch.equal(alone[1], whole[1][n : n + 1])


def test_a_layer_is_one_graph_that_keeps_its_weight_and_no_copy(narrow: None) -> None:
    """ZeRO-3 frees the weight between forward and backward pass, but not a copy or view of it that autograd keeps."""
    fc1 = layer(narrow)
    x = torch.randn(4, 16, 256, dtype=torch.bfloat16)
    kept: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        kept.append(value)
        return value

    compiled = torch.compile(fc1.forward, fullgraph=True, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        out = compiled(x.requires_grad_())
    torch.testing.assert_close(out, fc1(x))
    out.sum().backward()
    large = [value for value in kept if value.numel() >= fc1.weight.numel()]
    assert [value is fc1.weight for value in large] == [True]


def test_operations_of_a_layer(narrow: None) -> None:
    """Four casts, of x, twice W, and dy; with the product for dW in bf16 two of three products are in FP8."""
    fc1 = layer(narrow)
    x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
    with Count() as count:
        fc1(x).sum().backward()
    assert count.found == {"casts": 4, "numbers": 64 * 256 + 2 * 256 * 1024 + 64 * 1024, "products": 3}


def config_of(digits: Path, folder: Path, *, fp8: bool, steps: int = 8, **changes: Any) -> Any:
    performance = PerformanceConfig(precision="bf16", fp8=fp8)
    optim = AdamWConfig(lr=1e-3, schedule="constant")
    given = {"model": WIDE, "performance": performance, "optim": optim, "batch": BatchConfig(samples=16)}
    return tiny(digits, folder, steps, **{**given, **changes})


@pytest.mark.nightly
def test_a_training_stays_beside_bf16(narrow: None, world: World, digits: Path, tmp_path: Path) -> None:
    """60 steps of 32 with two blocks end 0.08 % above bf16; the rounding of the forward pass alone is some percent."""
    for fp8 in (False, True):
        train(config_of(digits, tmp_path / str(fp8), fp8=fp8, output__checkpoint_every=4), launch(1), world)
    plain, rounded = losses(tmp_path / "False"), losses(tmp_path / "True")
    assert plain != rounded
    assert rounded == pytest.approx(plain, rel=0.01)
    assert statistics.mean(rounded[4:]) < 0.99 * statistics.mean(rounded[:4])
    with pytest.raises(ConfigError, match=r"--performance.fp8: true -> false"):
        train(config_of(digits, tmp_path / "True", fp8=False), launch(1), world)
    shapes = [newest(tmp_path / str(fp8)).manifest["parameters"] for fp8 in (False, True)]
    assert shapes[0] == shapes[1]


def narrowed(world: World, digits: Path, folder: Path, stage: int) -> list[float]:
    float8.LEAST = 256  # of this process, which ends with the trial
    train(config_of(digits, folder / str(stage), fp8=True, steps=2), launch(stage), world)
    return losses(folder / str(stage))


def test_zero_gathers_them_as_any_layer(digits: Path, tmp_path: Path) -> None:
    whole, gathered = (values(forked_ranks(narrowed, digits, tmp_path, stage))[0] for stage in (0, 3))
    assert gathered == pytest.approx(whole, rel=1e-3)


def test_the_first_line_names_them(narrow: None) -> None:
    config = replace(preset("digits"), model=WIDE, performance=PerformanceConfig(fp8=True))
    assert "4 linear layers by fp8 (emulated on a CPU)" in in_words(choices(config, CPU))
