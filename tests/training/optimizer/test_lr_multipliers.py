"""Learning rates per parameter (muP): the same steps in every engine, each as long as the parameter's rate says."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdiff.checkpoint.manifest import committed
from fastdiff.checkpoint.reader import Checkpoint
from fastdiff.config.command_line.config_file import with_optimizer
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.optimizers import registry
from fastdiff.config.run import RunConfig
from fastdiff.errors import ConfigError
from fastdiff.models.build import build_model
from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from tests.support.forked import forked_ranks, values
from tests.support.nights import by_day
from tests.support.processes import ROOT
from tests.support.runs import assert_same_checkpoint, hexes, launch, losses, newest, tiny, train_losses

BASE = 16
"""One head; the network of ``tiny`` is twice as wide."""
HIDDEN = (
    "attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight", "adaLN_modulation.1.weight",
    "t_embedder.mlp.2.weight",
)  # fmt: skip
"""Ends of the names of the matrices whose rate is halved."""
ENGINES = [("flat", 0), ("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3)]
DECAY = 0.1


def run_of(digits: Path, folder: Path, engine: str = "flat", steps: int = 4, **changes: Any) -> RunConfig:
    """A run that decays weights, without clipping."""
    config = tiny(digits, folder, steps, performance__engine=engine, optim__clip=0.0, optim__weight_decay=DECAY)
    for name, value in {"model__base_width": BASE, **changes}.items():
        part, _, field = name.partition("__")
        config = replace(config, **{part: replace(getattr(config, part), **{field: value})})
    return config


def multiplier(name: str) -> float:
    return 0.5 if name.endswith(HIDDEN) else 1.0


@pytest.mark.parametrize(
    ("engine", "stage", "kernels"),
    [("flat", 0, "auto"), ("flat", 0, "auto,adamw=triton"), ("deepspeed", 0, "auto"), ("deepspeed", 3, "auto")],
)
def test_a_step_has_the_rate_of_each_parameter(
    world: World, digits: Path, tmp_path: Path, engine: str, stage: int, kernels: str
) -> None:
    """The third of four, at half the rate, beside AdamW in float64 from the saved moments; the decay is one for all."""
    changes = {
        "optim__schedule": "linear",
        "performance__kernels": kernels,
        "output__checkpoint_every": 1,
        "output__keep": 4,
    }
    run = run_of(digits, tmp_path, engine, **changes)
    train(run, launch(stage), world)
    third, second = (Checkpoint(folder) for folder in committed(tmp_path / "checkpoints")[1:3])
    before, after, m, v = second.full("master"), third.full("master"), third.full("exp_avg"), third.full("exp_avg_sq")
    rate, betas = run.optim.lr / 2, run.optim.betas
    for name, weight in before.items():
        mean, square = m[name].double() / (1 - betas[0] ** 3), v[name].double() / (1 - betas[1] ** 3)
        moved = rate * multiplier(name) * mean / (square.sqrt() + run.optim.eps)
        expected = weight.double() * (1 - rate * DECAY) - moved
        torch.testing.assert_close(after[name].double(), expected, rtol=1e-6, atol=2e-8)


def first_steps(
    world: World, config: RunConfig, stage: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Changes of the weights in two steps with the rates of muP, and with one rate.

    The first moves the output layer alone, which is zero, so that the gradients of the second are equal, too.
    """
    initial = dict(build_model(config.model, seed=config.seed).named_parameters())
    found = []
    for name, hidden in (("several", DiTConfig.hidden_matrices), ("one", ())):
        with monkeypatch.context() as patched:
            patched.setattr(DiTConfig, "hidden_matrices", hidden)
            folder = Path(config.output.folder) / name
            train(replace(config, output=replace(config.output, folder=str(folder))), launch(stage), world)
        found.append({name: value - initial[name].detach() for name, value in newest(folder).full("master").items()})
    return found[0], found[1]


@pytest.mark.parametrize(
    ("engine", "stage"), by_day([("flat", 0), ("deepspeed", 2)], ("deepspeed", 0), ("deepspeed", 3))
)
@pytest.mark.parametrize("optimizer", ["adamw8bit", "toy"])
def test_other_optimizers_take_steps_of_these_rates(
    world: World, digits: Path, tmp_path: Path, engine: str, stage: int, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With moments in 8 bits, and one of another package that needs whole matrices and says that the rates suit it."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "support")
    from toy_optimizer.family import TOY

    monkeypatch.setitem(registry._registered, "toy", replace(TOY, of_adam_size=True))
    plain = tiny(digits, tmp_path, 2, performance__engine=engine)
    config = with_optimizer(plain, optimizer, "this test")
    config = replace(config, model=replace(config.model, base_width=BASE))
    several, one = first_steps(world, config, stage, monkeypatch)
    assert any(change.abs().max() > 0 for name, change in one.items() if name.endswith(HIDDEN))
    for name, change in one.items():
        torch.testing.assert_close(several[name], multiplier(name) * change, rtol=1e-4, atol=1e-7)


def in_engines(world: World, digits: Path, folder: Path, optimizer: str) -> dict[str, tuple[list[float], list[float]]]:
    """Losses of four steps by engine and stage, at once and in two parts."""
    found = {}
    for engine, stage in ENGINES:
        name = f"{engine}-{stage}"
        options = {"optim__name": optimizer}
        whole = train_losses(world, run_of(digits, folder / name / "whole", engine, 4, **options), launch(stage))
        train_losses(world, run_of(digits, folder / name / "parts", engine, 2, **options), launch(stage))
        parts = train_losses(world, run_of(digits, folder / name / "parts", engine, 4, **options), launch(stage))
        found[name] = whole, parts
    return found


@pytest.mark.parametrize("optimizer", by_day(["adamw"], "adamw8bit"))
def test_every_engine_and_stage_trains_alike_and_resumes_bitwise(digits: Path, tmp_path: Path, optimizer: str) -> None:
    """On two ranks. Measured: losses 4e-8 apart, as without muP: torch's AdamW rounds the ends of slices otherwise."""
    found = values(forked_ranks(in_engines, digits, tmp_path, optimizer))[0]
    for name, (whole, parts) in found.items():
        assert hexes(parts) == hexes(whole), name
        assert whole == pytest.approx(found["flat-0"][0], rel=1e-6), name
        assert_same_checkpoint(tmp_path / name / "whole", tmp_path / name / "parts")


def test_a_run_keeps_its_base_width_and_logs_its_own_rate(world: World, digits: Path, tmp_path: Path) -> None:
    train(run_of(digits, tmp_path, steps=2), launch(0), world)
    assert len(losses(tmp_path)) == 2
    with pytest.raises(ConfigError, match=r"model\.base_width: 16 -> 32"):
        train(run_of(digits, tmp_path, steps=4, model__base_width=32), launch(0), world)


def test_an_optimizer_without_known_rates_is_refused(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests" / "support")
    from toy_optimizer.family import TOY

    monkeypatch.setitem(registry._registered, "toy", TOY)
    config = with_optimizer(tiny(digits, tmp_path, 1), "toy", "this test")
    with pytest.raises(ConfigError, match=r"base_width 16 with --optim.name toy: .* use --optim.name adamw or"):
        replace(config, model=replace(config.model, base_width=BASE))
