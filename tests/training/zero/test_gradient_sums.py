"""Sums of 16-bit gradients over micro-batches and ranks, by the engine, at every ZeRO stage."""

import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdiff.config import deepspeed
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.errors import ConfigError
from fastdiff.models.build import build_model
from fastdiff.parallel.world import World
from fastdiff.training.build import build
from fastdiff.training.loop import train
from tests.support.forked import forked_ranks, values
from tests.support.runs import launch, losses, newest, renew_digest, tiny, train_losses

EXACT = 1e-6
"""Relative error of fp32 sums of bf16 gradients; measured at most 2.9e-8 for 16 and for 256 micro-batches."""


def gradient_error(world: World, digits: Path, folder: Path, stage: int, dtype: str, micros: int) -> float:
    """Relative error of the gradient of a step of ``micros`` micro-batches per rank, of one sample each.

    Compared with fp64 sums of the gradients that a plain network in bf16 has for the same micro-batches.
    """
    config = tiny(
        digits,
        folder / f"{stage}-{dtype}-{micros}",
        steps=1,
        samples=world.size * micros,
        batch__samples=world.size * micros,
        batch__micro=1,
        optim__clip=0.0,
        performance__precision="bf16",
        performance__grad_accum_dtype=dtype,
    )
    network = build_model(config.model, seed=config.seed).bfloat16()
    sums = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in network.named_parameters()}
    with ExitStack() as stack:
        run = build(config, launch(stage), world, stack)
        engine, objective = run.state.engine, run.state.objective
        for batch, _ in zip(run.batches, range(micros), strict=False):
            corruption = objective.add_noise(batch, engine)
            inputs = (corruption.noisy, corruption.time)
            engine.backward(objective.loss(engine(*inputs, **corruption.condition), batch, corruption).mean())
            loss = objective.loss(network(*inputs, **corruption.condition), batch, corruption).mean()
            (loss / micros).backward()
            for name, parameter in network.named_parameters():
                assert parameter.grad is not None
                sums[name] += parameter.grad.double() / world.size
                parameter.grad = None
        assert engine.step()
        expected = {name: world.sum_(value).flatten() for name, value in sums.items()}
        squares = torch.zeros(2, dtype=torch.float64)
        for flat in (flat for flat in engine.flats if flat.owned):
            first = flat.state["exp_avg"].view(-1) / (1 - config.optim.betas[0])
            for fragment in flat.fragments:
                wanted = expected[fragment.name][fragment.start : fragment.start + fragment.numel]
                difference = fragment.of(first).double() - wanted
                squares += torch.stack([difference.square().sum(), wanted.square().sum()])
        off, whole = world.sum_(squares).tolist()
    return math.sqrt(off / whole)


def errors(
    world: World, digits: Path, folder: Path, counts: tuple[int, ...], stages: tuple[int, ...]
) -> dict[tuple[int, str, int], float]:
    """Errors by ZeRO stage, dtype of the sums and number of micro-batches per rank."""
    return {
        (stage, dtype, micros): gradient_error(world, digits, folder, stage, dtype, micros)
        for micros in counts
        for dtype in ("fp32", "bf16")
        for stage in stages
    }


def test_fp32_sums_of_two_ranks_are_exact_at_every_stage(digits: Path, tmp_path: Path, nightly: bool) -> None:
    """deepspeed_configs/README.md has the figures; by day without the stages 0 and 2."""
    counts, stages = ((16, 256), (0, 1, 2, 3)) if nightly else ((8,), (1, 3))
    found = values(forked_ranks(errors, digits, tmp_path, counts, stages, timeout_s=1200))[0]
    for (stage, dtype, micros), error in found.items():
        if dtype == "fp32":
            assert error < EXACT, (stage, micros)
        else:
            assert error > 1e-3, (stage, micros)


def gradient(config: RunConfig) -> Tensor:
    """Gradient of a run of one step, up to a factor: its first moments, fp64, of all parameters."""
    moments = newest(Path(config.output.folder)).full("exp_avg")
    return torch.cat([moment.flatten() for moment in moments.values()]).double()


def test_two_ranks_in_bf16_add_up_as_one_that_accumulates(world: World, digits: Path, tmp_path: Path) -> None:
    """With micro-batches of the same size. (After the step a weight in bf16 may be rounded to its neighbour.)"""
    apart = {}
    for dtype in ("fp32", "bf16"):
        options = {"batch__micro": 4, "performance__precision": "bf16", "performance__grad_accum_dtype": dtype}
        one, two = (tiny(digits, tmp_path / f"{ranks}-{dtype}", 1, **options) for ranks in ("one", "two"))
        train(one, launch(2), world)
        values(forked_ranks(train_losses, two, launch(2)))
        apart[dtype] = float((gradient(two) - gradient(one)).norm() / gradient(one).norm())
    assert apart["fp32"] < EXACT
    assert apart["bf16"] > 1e-4


@pytest.mark.parametrize("engine", ["deepspeed", "flat"])
def test_a_parameter_without_a_gradient_counts_as_zero(world: World, digits: Path, tmp_path: Path, engine: str) -> None:
    """ZeRO-0 in bf16, where DeepSpeed itself would fill in zeros of another dtype."""
    options = {"performance__precision": "bf16", "performance__engine": engine}
    with ExitStack() as stack:
        built = build(tiny(digits, tmp_path, steps=1, batch__micro=8, **options), launch(0), world, stack).state.engine
        name, first = next(built.module.named_parameters())
        for _ in range(2):
            built.backward(first.square().sum())
        assert built.step()
        moved = {
            fragment.name
            for flat in built.flats
            for fragment in flat.fragments
            if fragment.of(flat.state["exp_avg"].view(-1)).any()
        }
    assert moved == {name}


@pytest.mark.parametrize("stage", [1, 2])
def test_a_skipped_step_leaves_nothing_in_sums_on_the_host(
    world: World, digits: Path, tmp_path: Path, stage: int
) -> None:
    """DeepSpeed keeps them: every step after one that is not finite would be void, too."""
    start = launch(stage)
    start.deepspeed["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    with ExitStack() as stack:
        config = tiny(digits, tmp_path, steps=1, batch__micro=8, performance__precision="bf16")
        engine = build(config, start, world, stack).state.engine
        for factor, applied in ((math.nan, False), (1.0, True)):
            for _ in range(2):
                engine.backward(factor * sum(p.float().square().sum() for p in engine.module.parameters()))
            assert engine.step() == applied


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_sums_are_in_fp32_or_in_the_precision(precision: Any) -> None:
    assert PerformanceConfig(precision=precision).sums == "fp32"
    assert PerformanceConfig(precision=precision, grad_accum_dtype=precision).sums == precision
    other = "fp16" if precision == "bf16" else "bf16"
    with pytest.raises(ConfigError, match=f"--performance.grad_accum_dtype {other} with --performance.precision"):
        PerformanceConfig(precision=precision, grad_accum_dtype=other)


def test_the_deepspeed_json_names_the_sums_and_may_not_contradict() -> None:
    config = RunConfig(performance=PerformanceConfig(precision="bf16", grad_accum_dtype="bf16"))
    resolved = deepspeed.resolve({"data_types": {"grad_accum_dtype": "auto"}}, config, 1)
    assert (resolved["data_types"], resolved["communication_data_type"]) == ({"grad_accum_dtype": "bf16"}, "bf16")
    assert deepspeed.resolve({}, RunConfig(), 1)["communication_data_type"] == "fp32"
    for given in ({"communication_data_type": "bf16"}, {"data_types": {"grad_accum_dtype": "bf16"}}):
        with pytest.raises(ConfigError, match=r'--performance.grad_accum_dtype gives "fp32"; write "auto"'):
            deepspeed.resolve(given, RunConfig(), 1)
    with pytest.raises(ConfigError, match=r'"data_types.param_dtype", which --performance.precision decides'):
        deepspeed.resolve({"data_types": {"param_dtype": "bf16"}}, RunConfig(), 1)


def test_a_run_keeps_its_sums(world: World, digits: Path, tmp_path: Path) -> None:
    """A new one is recorded with fp32; one of a version without the field goes on in its precision."""
    changes: dict[str, Any] = {"batch__micro": 4, "performance__precision": "bf16"}
    recorded = ("config", "performance", "grad_accum_dtype")

    def saved(folder: str) -> Any:
        content: Any = newest(tmp_path / folder).manifest
        for key in recorded:
            content = content[key]
        return content

    train(tiny(digits, tmp_path / "new", steps=2, **changes), launch(1), world)
    assert saved("new") == "fp32"
    assert json.loads((tmp_path / "new" / "run.json").read_text())["deepspeed"]["communication_data_type"] == "fp32"
    with pytest.raises(ConfigError, match=r'performance.grad_accum_dtype: "fp32" -> "bf16"'):
        train(
            tiny(digits, tmp_path / "new", steps=4, **changes, performance__grad_accum_dtype="bf16"), launch(1), world
        )

    whole = train_losses(
        world, tiny(digits, tmp_path / "whole", **changes, performance__grad_accum_dtype="bf16"), launch(1)
    )
    train(tiny(digits, tmp_path / "old", 3, **changes, performance__grad_accum_dtype="bf16"), launch(1), world)
    manifest = newest(tmp_path / "old").folder / "MANIFEST.json"
    content = json.loads(manifest.read_text())
    del content["config"]["performance"]["grad_accum_dtype"]
    manifest.write_text(json.dumps(content))
    renew_digest(manifest)
    train(tiny(digits, tmp_path / "old", **changes), launch(1), world)
    assert losses(tmp_path / "old") == whole
    assert saved("old") == "bf16"
