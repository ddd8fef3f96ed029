"""DiT blocks in FP8, emulated on a CPU: their gradients, which become such, scales on any ranks, and resumes."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.pretrained import LoraConfig, PretrainedConfig
from fastdiff.config.optimizers.adamw import AdamWConfig
from fastdiff.config.presets import preset
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.errors import ConfigError
from fastdiff.models import delayed_scales, fp8
from fastdiff.models.build import Model, build_model
from fastdiff.models.delayed_scales import PLAIN, DelayedScales, forms
from fastdiff.models.dit.block import DiTBlock
from fastdiff.models.dit.fp8 import Fp8DiTBlock
from fastdiff.models.kernel_choice import choices, in_words
from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from fastdiff_kernels import dispatch
from tests.support.forked import forked_ranks, values
from tests.support.runs import assert_same_checkpoint, hexes, launch, losses, newest, tiny

CPU = torch.device("cpu")
SMALL = DiTConfig(depth=3, hidden=64, heads=4, patch=2, channels=1, size=8, classes=10)
FP8 = PerformanceConfig(precision="bf16", fp8=True)
ALL = replace(FP8, fp8_ends=0)
BF16 = PerformanceConfig(precision="bf16")
SHORT = 4
"""Steps of the window, instead of 16."""


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "LEAST", 64)
    monkeypatch.setattr(delayed_scales, "WINDOW", SHORT)


def drawn(config: DiTConfig, dtype: torch.dtype, performance: PerformanceConfig | None = None) -> Model:
    """A network with random weights in all layers: those of a new one are partly zeros."""
    torch.manual_seed(0)
    model = build_model(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    model.to(dtype)
    if performance is not None:
        fp8.convert(model, performance, CPU)
    return model


def gradients(model: Model) -> Tensor:
    """All gradients of a loss, joined."""
    torch.manual_seed(1)
    noisy, upstream = torch.randn(3, 1, 8, 8), torch.randn(3, 1, 8, 8)
    model.zero_grad()
    model(noisy, torch.arange(3), torch.arange(3)).float().mul(upstream).sum().backward()
    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


def settled(model: Model, factor: float = 1.0) -> Tensor:
    """The gradients once the scales are those of the same maxima, times a factor."""
    for _ in range(delayed_scales.WINDOW):
        gradients(model)
        assert isinstance(model.scales, DelayedScales)
        model.scales.maxima *= factor
        model.scales.end_step(lambda largest: largest, applied=True)
    return gradients(model)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def test_written_out_gradients_are_those_of_autograd(narrow: None) -> None:
    """In fp32, before there are scales: products are not rounded."""
    exact, found = drawn(SMALL, torch.float32), drawn(SMALL, torch.float32, ALL)
    assert error(gradients(found), gradients(exact)) < 1e-6


@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_gradients_are_off_by_the_rounding_of_e4m3(narrow: None, weights: Any) -> None:
    """By 0.021 and 0.023, bf16 by 0.012; scales of maxima that have grown since clip, which costs a multiple."""
    wide, limit = replace(SMALL, depth=4, hidden=128), 0.03
    exact = gradients(drawn(wide, torch.float32))
    assert error(gradients(drawn(wide, torch.bfloat16)), exact) < 0.015
    model = drawn(wide, torch.bfloat16, replace(ALL, fp8_weight_gradients=weights))
    assert 0.015 < error(settled(model), exact) < limit
    assert error(settled(model, factor=2.0), exact) < limit
    assert error(settled(model, factor=1 / 16), exact) > 3 * limit


@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_a_block_by_kernels_is_that_of_torch(narrow: None, weights: Any) -> None:
    """Of the forms with and without scales; the interpreter cuts bf16 numbers off, so that single numbers differ."""
    given = replace(ALL, fp8_weight_gradients=weights)
    plain, model = (drawn(replace(SMALL, depth=1), torch.bfloat16, given) for _ in range(2))
    with dispatch.forced(adaln="triton"):
        before, found = gradients(model), settled(model)
    assert error(before, gradients(plain)) < 0.02
    assert error(found, settled(plain)) < 0.03


def test_without_gradients_a_block_is_in_bf16(narrow: None) -> None:
    plain, model = drawn(SMALL, torch.bfloat16), drawn(SMALL, torch.bfloat16, ALL)
    settled(model)
    noisy = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(model(noisy, torch.arange(2)), plain(noisy, torch.arange(2)))
    assert not torch.equal(model(noisy, torch.arange(2)), plain(noisy, torch.arange(2)))


def test_a_block_is_one_graph_that_keeps_its_weights_and_no_copy(narrow: None) -> None:
    """ZeRO-3 frees the weights between forward and backward pass, but not a copy of one that autograd keeps."""
    model = drawn(replace(SMALL, depth=1), torch.bfloat16, ALL)
    eager = settled(model)
    kept: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        kept.append(value)
        return value

    model.compile_blocks(backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        compiled = gradients(model)
    assert error(compiled, eager) < 0.01
    block = cast(DiTBlock, model.get_submodule("blocks.0"))
    weights = [layer.weight for group in Fp8DiTBlock.layers(block) for layer in group]
    shapes = [shape for weight in weights for shape in (weight.shape, weight.shape[::-1]) if shape[0] != shape[1]]
    copies = [v.shape for v in kept if v.shape in shapes and not any(v is weight for weight in weights)]
    assert all(any(v is weight for v in kept) for weight in weights)
    assert copies == []


def test_scales_are_powers_of_two_with_a_margin(narrow: None) -> None:
    scales = DelayedScales(1, 1, CPU, forms(weight_gradients=True))
    scales.attach(3)
    for step in range(SHORT):
        scales.maxima.copy_(torch.tensor([224.0, 224.1, 3 * 224.0]) / 2 ** (step + 3))
        scales.end_step(lambda largest: largest, applied=True)
    # The first step has the largest: 28 of 448 with a margin of 2 is a factor of 1/8; the gradients are of three ranks.
    assert scales.units.flatten().tolist() == [1 / 8, 1 / 4, 4 / 8]
    for _ in range(SHORT - 1):
        scales.end_step(lambda largest: largest, applied=True)
    assert scales.units.flatten().tolist() == [1 / 64, 1 / 32, 4 / 64], "the last of the window"


def test_a_measurement_goes_without_the_first_steps(narrow: None) -> None:
    scales = DelayedScales(1, 1, CPU, forms(weight_gradients=True))
    rehearsed = [scales.forms for _ in scales.each_form()]
    assert rehearsed == [PLAIN, forms(weight_gradients=True)]
    assert scales.forms == PLAIN
    scales.end_warm_up()
    scales.end_step(lambda largest: largest, applied=True)
    assert scales.forms == forms(weight_gradients=True)


def test_a_history_of_other_blocks_is_told_and_begun_anew(capsys: pytest.CaptureFixture[str]) -> None:
    saved, other = (DelayedScales(blocks, 4, CPU, forms(weight_gradients=True)) for blocks in (28, 26))
    saved.maxima.fill_(3.0)
    saved.end_step(lambda maxima: maxima, applied=True)
    other.restore(saved.state())
    assert "scales of 28 blocks in FP8, and this run has 26" in "".join(capsys.readouterr())
    assert not other.state()["steps"]
    assert not other.state()["maxima"].any()


def test_a_skipped_step_leaves_the_history(narrow: None) -> None:
    scales = DelayedScales(1, 1, CPU, forms(weight_gradients=True))
    before = {name: value.clone() for name, value in scales.state().items()}
    scales.maxima.fill_(torch.inf)
    scales.end_step(lambda largest: largest, applied=False)
    assert all(torch.equal(value, before[name]) for name, value in scales.state().items())
    assert not scales.maxima.any()


@pytest.mark.parametrize("largest", [torch.nan, torch.inf])
def test_a_maximum_that_is_not_finite_leaves_the_history_of_its_operand(narrow: None, largest: float) -> None:
    scales = DelayedScales(1, 1, CPU, forms(weight_gradients=True))
    for _ in range(SHORT):
        scales.maxima.fill_(28.0)
        scales.end_step(lambda maxima: maxima, applied=True)

    def to_agree_on(maxima: Tensor) -> None:
        assert not maxima.isnan().any(), "of which a maximum over ranks may be either"

    for _ in range(SHORT):
        scales.maxima.copy_(torch.tensor([14.0, largest, 14.0]))
        scales.end_step(to_agree_on, applied=True)
    assert scales.state()["maxima"][:, 0, 0].tolist() == [[14.0, 28.0, 14.0]] * SHORT
    assert scales.units.flatten().tolist() == [1 / 16, 1 / 8, 1 / 16]


def config_of(digits: Path, folder: Path, *, steps: int = 12, **changes: Any) -> Any:
    given = {
        "model": SMALL,
        "samples": steps * 32,
        "performance": FP8,
        "optim": AdamWConfig(lr=1e-3, schedule="constant"),
        "batch": BatchConfig(samples=32),
    }
    return tiny(digits, folder, **{**given, **changes})


def scales_of(folder: Path) -> Tensor:
    """Scales that follow from the newest checkpoint."""
    history = newest(folder).fp8()
    scales = DelayedScales(history["maxima"].shape[1], 4, CPU, forms(weight_gradients=True))
    scales.restore(history)
    return scales.units


def test_scales_and_losses_do_not_depend_on_the_micro_batch(
    narrow: None, world: World, digits: Path, tmp_path: Path
) -> None:
    for micro in (8, 16, 32):
        given = config_of(digits, tmp_path / str(micro), batch=BatchConfig(samples=32, micro=micro))
        train(given, launch(0), world)
    whole = losses(tmp_path / "32")
    assert whole[-1] < whole[0]
    for part in (tmp_path / "8", tmp_path / "16"):
        assert losses(part) == pytest.approx(whole, rel=1e-4)
        assert torch.equal(scales_of(part), scales_of(tmp_path / "32"))
    train(config_of(digits, tmp_path / "bf16", performance=BF16), launch(0), world)
    plain = losses(tmp_path / "bf16")
    assert plain[:SHORT] == pytest.approx(whole[:SHORT], rel=1e-3), "the first steps are in bf16"
    assert plain != whole
    assert whole == pytest.approx(plain, rel=0.01)


def trained(world: World, digits: Path, folder: Path, stage: int, steps: int, **performance: Any) -> list[float]:
    fp8.LEAST, delayed_scales.WINDOW = 64, SHORT  # of this process, which ends with the trial
    given = config_of(digits, folder, steps=steps, performance=replace(FP8, **performance))
    train(given, launch(stage), world)
    return losses(folder)


@pytest.mark.parametrize("stage", [0, 3])
def test_scales_do_not_depend_on_the_ranks(
    narrow: None, world: World, digits: Path, tmp_path: Path, stage: int
) -> None:
    """The same run on one rank, and on one, two and one."""
    alone = trained(world, digits, tmp_path / "alone", stage, 18)
    trained(world, digits, tmp_path / "moved", stage, 6)
    values(forked_ranks(trained, digits, tmp_path / "moved", stage, 12))
    moved = trained(world, digits, tmp_path / "moved", stage, 18)
    assert moved == pytest.approx(alone, rel=1e-3)
    assert torch.equal(scales_of(tmp_path / "moved"), scales_of(tmp_path / "alone"))


def test_a_resumed_run_is_equal_to_the_bit(narrow: None, world: World, digits: Path, tmp_path: Path) -> None:
    """Saved while the history is being filled, and behind."""
    whole = trained(world, digits, tmp_path / "whole", 0, 12)
    for steps in (3, 9, 12):
        parts = trained(world, digits, tmp_path / "parts", 0, steps)
    assert hexes(parts) == hexes(whole)
    assert_same_checkpoint(tmp_path / "whole", tmp_path / "parts")


def test_recomputed_blocks_are_the_same(narrow: None, world: World, digits: Path, tmp_path: Path) -> None:
    plain = trained(world, digits, tmp_path / "plain", 0, 8)
    assert hexes(trained(world, digits, tmp_path / "recomputed", 0, 8, recompute=True)) == hexes(plain)
    assert torch.equal(scales_of(tmp_path / "plain"), scales_of(tmp_path / "recomputed"))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (replace(preset("dit-s-2-256"), performance=FP8), "this network has 384 and 1152 and 1536"),
        (replace(preset("sd2-512"), performance=FP8), "UNet has no blocks in FP8"),
        (replace(preset("dit-xl-2-256"), performance=replace(FP8, fp8_ends=14)), "28 blocks, of which 14 at each end"),
    ],
)
def test_a_network_that_gains_nothing_is_refused(config: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        choices(config, CPU)


def test_a_number_of_tokens_that_no_product_takes_is_refused(narrow: None) -> None:
    few = replace(preset("digits"), model=replace(SMALL, size=4), performance=FP8)
    with pytest.raises(ConfigError, match=r"4 tokens per sample.*--performance.fp8_weight_gradients bf16"):
        choices(few, CPU)
    choices(replace(few, performance=replace(FP8, fp8_weight_gradients="bf16")), CPU)


def test_devices_that_gain_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"this GPU \(sm_86\) has no FP8 products, which begin with sm_89"):
        fp8.require_usable((8, 6), compiled=True)
    with pytest.raises(ConfigError, match="gains only in compiled blocks"):
        fp8.require_usable((9, 0), compiled=False)
    fp8.require_usable((8, 9), compiled=True)
    fp8.require_usable(None, compiled=False)


def test_flags_of_fp8_alone_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"--performance.fp8_ends 0 change nothing in 16 bits: each needs --performance.fp8"
    ):
        PerformanceConfig(fp8_ends=0)


def test_other_dtypes_and_adapters_are_refused() -> None:
    with pytest.raises(ConfigError, match="FP8 layers are part of a network in bf16"):
        PerformanceConfig(fp8=True, precision="fp16")
    given: dict[str, Any] = {"lora": LoraConfig(rank=4), "pretrained": PretrainedConfig(path="pipeline", weights=True)}
    with pytest.raises(ConfigError, match="the adapted layers are frozen"):
        replace(preset("sd15-finetune"), performance=PerformanceConfig(fp8=True), **given)


def test_the_first_line_names_them() -> None:
    config = replace(preset("dit-xl-2-256"), performance=FP8)
    assert "products of 26 blocks by fp8 (emulated on a CPU)" in in_words(choices(config, CPU))
