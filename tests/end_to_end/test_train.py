"""The promises of the trainer, on real DeepSpeed ranks."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastdiff.checkpoint.power_function import exponent, share
from fastdiff.config.deepspeed import named, read, resolve
from fastdiff.config.launch_options import Launch
from fastdiff.config.run import RunConfig
from fastdiff.models.build import build_model
from fastdiff.models.dit.network import DiT
from fastdiff.parallel.fragments import assemble
from fastdiff.parallel.world import World
from fastdiff.training.ema import Ema
from fastdiff.training.engines.deepspeed import DeepSpeedEngine
from fastdiff.training.loop import train
from tests.support.forked import forked_ranks, values
from tests.support.runs import STEPS, assert_same_checkpoint, launch, losses, newest, records, tiny, train_losses


def close(a: list[float], b: list[float], relative: float) -> bool:
    return len(a) == len(b) and all(math.isclose(x, y, rel_tol=relative) for x, y in zip(a, b, strict=True))


def test_one_rank_with_accumulation_equals_two_ranks(world: World, digits: Path, tmp_path: Path) -> None:
    accumulated = train_losses(world, tiny(digits, tmp_path / "one", batch__micro=8), launch())
    config = tiny(digits, tmp_path / "two", batch__micro=8)
    parallel = values(forked_ranks(train_losses, config, launch()))[0]
    assert close(accumulated, parallel, 1e-6)
    assert accumulated[-1] < accumulated[0]


def _every_stage(world: World, digits: Path, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Losses by optimizer and file of DeepSpeed, and under ZeRO-3 that partitions even what is small."""
    starts = {name: Launch(deepspeed=read(name)) for name in named()} | {"partitioned": launch(3)}
    return {
        optimizer: {
            name: train_losses(world, tiny(digits, folder / f"{optimizer}-{name}", 4, optim__name=optimizer), start)
            for name, start in starts.items()
        }
        for optimizer in ("adamw", "adamw8bit")
    }


def test_zero_stages_agree(digits: Path, tmp_path: Path) -> None:
    for optimizer, found in values(forked_ranks(_every_stage, digits, tmp_path))[0].items():
        for name, measured in found.items():
            assert close(measured, found["ddp"], 1e-5), (optimizer, name)


STAGES = {"adamw": (0, 2), "adamw8bit": (1, 3), "adamw8bit-bnb": (0,)}


@pytest.mark.parametrize("optimizer", STAGES)
def test_bf16_follows_fp32(world: World, digits: Path, tmp_path: Path, optimizer: str, nightly: bool) -> None:
    """Each at one or two stages; by night all at every one."""
    exact = train_losses(world, tiny(digits, tmp_path / "fp32", 4, optim__name=optimizer), launch(0))
    for stage in range(4) if nightly else STAGES[optimizer]:
        changes = {"performance__precision": "bf16", "optim__name": optimizer}
        found = train_losses(world, tiny(digits, tmp_path / str(stage), 4, **changes), launch(stage))
        assert close(found, exact, 0.02), stage
        assert found != exact, "the forward pass is really in bf16"


_DAILY = {
    ("adamw", "fp32"): (3,),
    ("adamw8bit", "fp32"): (2,),
    ("adamw8bit-bnb", "fp32"): (3,),
    ("adamw", "bf16"): (0, 2),
    ("adamw8bit", "bf16"): (1,),
}
"""The stages at which each optimizer and precision resumes every day; by night all do at every one."""


@pytest.mark.fault(26)
@pytest.mark.parametrize(
    ("optimizer", "precision", "stage"),
    [
        pytest.param(*pair, stage, marks=() if stage in daily else pytest.mark.nightly)
        for pair, daily in _DAILY.items()
        for stage in range(4)
    ],
)
def test_resume_equals_the_uninterrupted_run(
    world: World,
    digits: Path,
    tmp_path: Path,
    optimizer: str,
    precision: str,
    stage: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a learning rate that changes, and a log that is due between checkpoints and between steps of the log."""
    schedule = {"optim__schedule": "cosine", "optim__warmup_steps": 2, "optim__weight_decay": 0.1}
    cadence = {"output__checkpoint_every": 3, "output__log_every": 2}
    changes = {"optim__name": optimizer, "performance__precision": precision, **schedule, **cadence}
    train(tiny(digits, tmp_path / "whole", **changes), launch(stage), world)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-00000006")
    capsys.readouterr()
    train(tiny(digits, tmp_path / "parts", **changes), launch(stage), world)
    assert "resuming from step 3" in capsys.readouterr().err
    whole, parts = (
        [(r["step"], r["loss"].hex(), r["lr"], r["grad_norm"]) for r in records(tmp_path / name)]
        for name in ("whole", "parts")
    )
    assert parts == whole
    assert_same_checkpoint(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.fault(22)
@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_adamw_resumes_at_other_stages(world: World, digits: Path, tmp_path: Path, before: int, nightly: bool) -> None:
    """From each to the next one, so that each is left and reached; by night all pairs."""
    every = {"output__checkpoint_every": STEPS // 2}
    whole = train_losses(world, tiny(digits, tmp_path / "whole", **every), launch(before))
    shutil.copytree(tmp_path / "whole", tmp_path / "start")
    shutil.rmtree(tmp_path / "start" / "checkpoints" / f"step-{STEPS:08d}")
    for after in range(4) if nightly else ((before + 1) % 4,):
        shutil.copytree(tmp_path / "start", tmp_path / str(after))
        config = tiny(digits, tmp_path / str(after), **every)
        assert close(train_losses(world, config, launch(after)), whole, 1e-5), after


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        *[(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16")],
        *(pytest.param(*pair, marks=pytest.mark.nightly) for pair in ((0, "bf16"), (3, "fp32"))),
    ],
)
def test_gradient_clipping_clips(world: World, digits: Path, tmp_path: Path, stage: int, precision: str) -> None:
    """After one step Adam's first moment is (1 - beta1) times the clipped gradient."""
    check_clipping(world, tiny(digits, tmp_path / "run", steps=1, performance__precision=precision), stage)


def check_clipping(world: World, config: RunConfig, stage: int) -> None:
    clip = 1e-3
    train(replace(config, optim=replace(config.optim, clip=clip)), launch(stage), world)
    folder = Path(config.output.folder)
    moments = newest(folder).full("exp_avg")
    norm = math.sqrt(sum(float(m.double().square().sum()) for m in moments.values()))
    assert norm == pytest.approx(0.1 * clip, rel=1e-2)
    assert records(folder)[0]["grad_norm"] > 100 * clip


@pytest.mark.fault(26)
def test_sharded_ema_equals_a_gathered_ema_bitwise(digits: Path, tmp_path: Path) -> None:
    for equal in values(forked_ranks(_compare_ema, digits, tmp_path)):
        assert len(equal) == 16
        assert all(equal.values()), equal


def _compare_ema(world: World, digits: Path, folder: Path) -> dict[tuple[int, str], bool]:
    """Average the gathered weights after every step, beside the sharded average, at every stage."""
    equal: dict[tuple[int, str], bool] = {}
    for stage in range(4):
        config = tiny(digits, folder / f"ema{stage}")
        engine = DeepSpeedEngine(
            build_model(config.model),
            config,
            resolve(launch(stage).deepspeed, config, world.size),
            world,
            DiT.block_classes,
        )
        ema = Ema(engine.flats, (0.9, 0.5), power_stds=(0.05, 0.25))
        shares = {
            "0.9": lambda _: 1.0 - 0.9,
            "0.5": lambda _: 0.5,
            "power-0.05": lambda t: share(exponent(0.05), t),
            "power-0.25": lambda t: share(exponent(0.25), t),
        }
        masters = [flat.master for flat in engine.flats]
        full = dict.fromkeys(shares, assemble(world, engine.flats, masters, engine.shapes))
        for step in range(4):
            images = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(10 * step + world.rank))
            prediction = engine(images, torch.full((8,), step), torch.arange(8))
            engine.backward((prediction - images).square().mean())
            assert engine.step()
            ema.update(step + 1)
            weights = assemble(world, engine.flats, masters, engine.shapes)
            full = {
                kind: {name: torch.lerp(value, weights[name], part(step + 1)) for name, value in full[kind].items()}
                for kind, part in shares.items()
            }
        assert list(ema.averages) == list(shares)
        for kind, expected in full.items():
            average = assemble(world, engine.flats, ema.averages[kind], engine.shapes)
            moved = any(not torch.equal(average[name], weights[name]) for name in expected)
            equal[stage, kind] = moved and all(torch.equal(average[name], expected[name]) for name in expected)
            held = sum(t.numel() for t in ema.averages[kind] if t is not None)
            assert held < 0.6 * sum(t.numel() for t in expected.values()), "each of two ranks averages about half"
    return equal


def test_a_run_beyond_its_samples_says_so(
    world: World, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command does nothing then, and ends well."""
    train(tiny(digits, tmp_path / "run", steps=4), launch(), world)
    assert "nothing to train" not in capsys.readouterr().err
    train(tiny(digits, tmp_path / "run", steps=2), launch(), world)
    said = capsys.readouterr().err
    assert f"{tmp_path / 'run'} has seen 64 samples, more than --samples 32: there is nothing to train" in said
    assert len(losses(tmp_path / "run")) == 4
