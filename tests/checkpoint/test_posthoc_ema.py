"""Power-function averages: the paper's definition, and any std from snapshots after the training."""

import itertools
import json
import math
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fastdiff.checkpoint.manifest import committed, step_of, verify
from fastdiff.checkpoint.posthoc_ema import reconstruct
from fastdiff.checkpoint.power_function import exponent, fit, product, share
from fastdiff.checkpoint.reader import Checkpoint
from fastdiff.checkpoint.step_folders import StepFolders
from fastdiff.cli.main import main
from fastdiff.config.sections.data import ValidationConfig
from fastdiff.config.sections.ema import EmaConfig
from fastdiff.errors import ConfigError, FastdiffError
from fastdiff.parallel.world import World
from fastdiff.training.ema import Ema
from fastdiff.training.loop import train
from tests.support.forked import forked_ranks
from tests.support.injected.crash_points import LOSSES, CrashPoints, cut_power, operations
from tests.support.processes import run_ranks
from tests.support.runs import launch, newest, renew_digest, tiny, train_losses
from tests.training.callbacks.test_divergence import in_step, lines, marred, spiky
from tests.training.test_ema import flat_of

STDS = (0.05, 0.07, 0.10)
STEPS = 24


def averages(trajectory: torch.Tensor, *stds: float) -> list[torch.Tensor]:
    """The averages of weights that follow ``trajectory`` (``[T, N]``)."""
    weights = torch.full_like(trajectory[0], 1e3)  # what they were before must not matter
    ema = Ema([flat_of(weights)], power_stds=stds)
    for step, values in enumerate(trajectory, 1):
        weights.copy_(values)
        ema.update(step)
    return [average for [average] in ema.averages.values() if average is not None]


@pytest.mark.parametrize(("std", "gamma"), [(0.05, 16.97), (0.10, 6.94), (math.sqrt(2) / 6, 1.0), (12**-0.5, 0.0)])
def test_the_exponent_of_a_std(std: float, gamma: float) -> None:
    """The first two are the paper's; the others by hand."""
    assert exponent(std) == pytest.approx(gamma, abs=5e-3 if std <= 0.1 else 1e-9)
    g = exponent(std)
    assert math.sqrt(g + 1) / (g + 2) / math.sqrt(g + 3) == pytest.approx(std, rel=1e-12)


def test_the_share_is_one_less_the_paper_s_beta() -> None:
    for t in (1, 2, 10, 1000):
        assert share(6.94, t) == pytest.approx(1 - (1 - 1 / t) ** 7.94, rel=1e-12)
    assert share(6.94, 10**12) == pytest.approx(7.94e-12, rel=1e-9), "no cancellation"


def test_an_average_is_the_integral_of_the_profile() -> None:
    """Weights that are w_i from time i - 1 to i, in float64 from the definition."""
    steps = 300
    trajectory = torch.randn(steps, 5, generator=torch.Generator().manual_seed(0)).cumsum(0)
    for std, found in zip((0.05, 0.10, 0.25), averages(trajectory, 0.05, 0.10, 0.25), strict=True):
        gamma = np.roots([1.0, 7.0, 16.0 - std**-2, 12.0 - std**-2]).real.max()
        profile = np.diff((np.arange(steps + 1) / steps) ** (gamma + 1))
        expected = profile @ trajectory.double().numpy()
        np.testing.assert_allclose(
            found.double().numpy(), expected, rtol=1e-6, atol=1e-6 * float(trajectory.abs().max())
        )


def test_products_of_profiles_against_integrals() -> None:
    tau = (np.arange(400_000) + 0.5) / 400_000 * 30.0
    for (g, s), (h, t) in (((6.94, 10.0), (16.97, 30.0)), ((16.97, 20.0), (6.94, 20.0)), ((2.0, 30.0), (9.0, 12.0))):
        first = np.where(tau <= s, (g + 1) * (tau / s) ** g / s, 0.0)
        second = np.where(tau <= t, (h + 1) * (tau / t) ** h / t, 0.0)
        expected = (first * second).sum() * (tau[1] - tau[0])
        assert float(product(g, s, h, t)) == pytest.approx(expected, rel=1e-4)


def test_the_fit_finds_what_is_there_and_gets_better_with_more() -> None:
    def basis(count: int, *stds: float) -> tuple[Any, Any]:
        ends = np.arange(1, count + 1) * (1e5 / count)
        return np.repeat([exponent(std) for std in stds], count), np.tile(ends, len(stds))

    found, error = fit(*basis(8, 0.05, 0.10), exponent(0.10), 1e5)
    np.testing.assert_allclose(found, np.eye(16)[15], atol=1e-9)
    assert error < 1e-6
    errors = []
    for count in (4, 16, 64, 256):
        found, error = fit(*basis(count, 0.05, 0.10), exponent(0.07), 1e5)
        assert found.sum() == pytest.approx(1.0, abs=1e-12)
        assert np.abs(found).sum() < 2, "the rounding of the snapshots is not magnified"
        errors.append(error)
    assert errors[0] < 0.1
    assert all(b < a / 8 for a, b in itertools.pairwise(errors)), errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"power_stds": (0.0,)}, "above 0 and at most 0.2887"),
        ({"power_stds": (0.29,)}, "above 0 and at most 0.2887"),
        ({"power_stds": (float("nan"),)}, "above 0"),
        ({"power_stds": (0.05, 0.05)}, "different stds"),
        ({"snapshot_every": 10}, "needs power-function averages: --ema.power_stds"),
        ({"power_stds": (0.05,), "snapshot_every": -1}, "at least 0"),
    ],
)
def test_wrong_stds_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EmaConfig(**options)


@pytest.fixture(scope="module")
def run(world: World, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that tracked three stds and took snapshots in every second step."""
    folder = tmp_path_factory.mktemp("power") / "run"
    train(_tracking(digits, folder, STEPS), launch(0), world)
    return folder


def _tracking(digits: Path, folder: Path, steps: int, stds: tuple[float, ...] = STDS, **changes: Any) -> Any:
    return tiny(
        digits, folder, steps, batch__micro=8, ema=EmaConfig(rates=(), power_stds=stds, snapshot_every=2), **changes
    )


@pytest.fixture
def two_stds(run: Path, tmp_path: Path) -> Path:
    """The same run as if it had not tracked the std 0.07."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    for path in copy.rglob("MANIFEST.json"):
        path.write_text(path.read_text().replace(json.dumps(list(STDS), indent=1).replace("\n", "\n "), "[0.05, 0.1]"))
        assert json.loads(path.read_text())["ema_stds"] == [0.05, 0.1]
        renew_digest(path)
    return copy


def flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([weights[name].double().flatten() for name in sorted(weights)])


def read(saved: Checkpoint, std: float) -> torch.Tensor:
    made = reconstruct(saved, std)
    return flat({name: made.read(name) for name in saved.manifest["parameters"]})


def test_a_std_made_from_two_others_is_the_one_that_was_tracked(two_stds: Path) -> None:
    saved = newest(two_stds)
    narrow, tracked, wide = (flat(saved.full(f"ema/power-{std}")) for std in (0.05, 0.07, 0.1))
    apart = (narrow - wide).norm()
    assert min((tracked - narrow).norm(), (tracked - wide).norm()) > 0.2 * apart
    assert (read(saved, 0.07) - tracked).norm() < 0.01 * apart
    snapshot = Checkpoint(committed(two_stds / "ema")[0])
    assert (read(snapshot, 0.07) - tracked).norm() < 0.02 * apart, "all in 16 bits"
    assert torch.equal(read(snapshot, 0.05), flat(snapshot.full("ema/power-0.05")))
    assert (read(snapshot, 0.05) - narrow).norm() < 3e-4 * narrow.norm(), "rounded to fp16"


def test_an_average_is_made_of_nothing_later_than_its_step(run: Path) -> None:
    saved = Checkpoint(run / "ema" / "step-00000012")
    steps = {step_of(term.saved.folder) for term in reconstruct(saved, 0.06).terms}
    assert steps == {2, 4, 6, 8, 10, 12}


def test_a_run_without_power_function_averages_makes_no_std(world: World, digits: Path, tmp_path: Path) -> None:
    train(tiny(digits, tmp_path / "run", steps=1), launch(0), world)
    with pytest.raises(ConfigError, match=r"no power-function average to make std 0.1 from; train with --ema"):
        reconstruct(newest(tmp_path / "run"), 0.1)


def test_stds_far_from_the_snapshots_are_refused(two_stds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = newest(two_stds)
    with pytest.raises(ConfigError, match=r"std 0.01 at step 24 cannot be made .* the fit misses \d+%"):
        reconstruct(saved, 0.01)
    with pytest.raises(ConfigError, match=r"std 0.3: above 0 and at most 0.2887"):
        reconstruct(saved, 0.3)
    terms = len(reconstruct(saved, 0.07).terms)
    assert terms == STEPS, "12 steps with two stds"
    damaged = two_stds / "ema" / "step-00000010" / "rank-00000.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert len(reconstruct(saved, 0.07).terms) == terms - 2
    assert "skipping a damaged snapshot" in capsys.readouterr().err


def test_the_commands_take_a_std(two_stds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    to = ["--format", "safetensors", "--ema-std"]
    assert main(["export", str(two_stds), str(out), *to, "0.07"]) == 0
    assert torch.equal(flat(load_file(out / "model.safetensors")), read(newest(two_stds), 0.07).float().double())
    assert "EMA of width 0.07 (fit error" in (out / "README.md").read_text()
    snapshot = Checkpoint(two_stds / "ema" / "step-00000012")
    assert main(["export", str(two_stds), str(tmp_path / "own"), *to, "0.1", "--step", "12"]) == 0
    assert torch.equal(
        flat(load_file(tmp_path / "own" / "model.safetensors")), flat(snapshot.full("ema/power-0.1")).float().double()
    )
    capsys.readouterr()
    draw = ["sample", str(two_stds), "--steps", "1", "--per-class", "1", "--grid", str(tmp_path / "grid.png")]
    for wish, expected in (([], "EMA of width 0.05"), (["--ema-std", "0.08"], "EMA of width 0.08 (fit error")):
        assert main([*draw, *wish]) == 0
        assert f"step 24, {expected}" in capsys.readouterr().out
    assert main([*draw, "--ema", "0.9"]) == 2
    assert "no EMA of rate 0.9; it has [] and stds (--ema-std) [0.05, 0.1]" in capsys.readouterr().err
    assert main(["export", str(two_stds), str(tmp_path / "none"), *to, "0.07", "--step", "13"]) == 2
    assert "no checkpoint and no snapshot of step 13; checkpoints: 24; snapshots: " in capsys.readouterr().err
    for wish in (["--ema", "0.9"], ["--raw"], []):
        plain = ["export", str(two_stds), str(tmp_path / "none"), "--format", "safetensors", *wish]
        assert main([*plain, "--step", "12"]) == 2
        assert "step 12 is a snapshot, which only --ema-std can use" in capsys.readouterr().err


def test_two_ranks_at_zero3_write_the_snapshots_of_one(run: Path, digits: Path, tmp_path: Path) -> None:
    run_ranks(train_losses, _tracking(digits, tmp_path / "two", 6), launch(3), ranks=2)
    folder = tmp_path / "two" / "ema" / "step-00000006"
    assert not verify(folder)
    assert {path.name for path in folder.iterdir()} == {
        "MANIFEST.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    }
    for std in (0.05, 0.08):
        one, two = (read(Checkpoint(path / "ema" / "step-00000006"), std) for path in (run, tmp_path / "two"))
        assert (one - two).norm() < 1e-3 * one.norm()


MANIFEST = {"format": "fastdiff-checkpoint", "version": 1}


def _snapshot(world: World, folder: Path, step: int, operation: int | None = None) -> int:
    """Commit a snapshot, or die at a file operation of that; return how many there are."""
    folder.mkdir(exist_ok=True)
    folders = StepFolders(folder / "ema", world, "a snapshot")
    points = CrashPoints(folder / "ema", folder / "journal.jsonl", operation)
    with points.watched():
        folders.commit(folders.draft(world, step, {"a": torch.ones(3)}, {"a": 0}, MANIFEST, torch.float16))
    return points.done


@pytest.mark.nightly
@pytest.mark.fault(2)
@pytest.mark.fault(4)
@pytest.mark.parametrize("again", [False, True], ids=["new", "in place of a damaged one"])
def test_a_kill_at_every_file_operation_of_a_snapshot_leaves_whole_ones(
    world: World, tmp_path: Path, again: bool
) -> None:
    """So does a power cut there. In place of a damaged one: from the operation on that takes its name away."""
    start = tmp_path / "start"
    for step in (2, 4) if again else (2,):
        _snapshot(world, start, step)
    if again:
        flip_last_byte(start / "ema" / "step-00000004" / "rank-00000.safetensors")
    (start / "journal.jsonl").unlink()
    shutil.copytree(start, tmp_path / "unharmed")
    count = _snapshot(world, tmp_path / "unharmed", 4)
    kinds = [record["op"] for record in operations([tmp_path / "unharmed" / "journal.jsonl"])]
    assert kinds.count("rename") == (2 if again else 1)
    assert count == len(kinds) >= 10, "the operations were really watched"
    for operation in range(kinds.index("rename") if again else 0, count):
        folder = tmp_path / str(operation)
        shutil.copytree(start, folder)
        [ended] = forked_ranks(_snapshot, folder, 4, operation, ranks=1)
        assert ended.code == -signal.SIGKILL
        done = operations([folder / "journal.jsonl"])
        for loss in LOSSES:
            shutil.copytree(folder, folder.with_name(f"{operation}-{loss}"))
            cut_power(folder.with_name(f"{operation}-{loss}") / "ema", done, loss)
        for left in (folder, *(folder.with_name(f"{operation}-{loss}") for loss in LOSSES)):
            _check_left(left / "ema", again)
            _snapshot(world, left, 4)
            assert {path.name for path in (left / "ema").iterdir()} == {"step-00000002", "step-00000004"}
            assert not any(verify(snapshot) for snapshot in committed(left / "ema")), left.name


def _check_left(folder: Path, again: bool) -> None:
    """Step 2 is as it was, and of step 4 there is a whole one, none or, if it was there, the damaged one."""
    assert not verify(folder / "step-00000002"), folder
    assert {path.name for path in committed(folder)} <= {"step-00000002", "step-00000004"}
    new = folder / "step-00000004"
    if again:
        assert new.exists() or new.with_suffix(".old.tmp").exists(), "the one is removed once the other is named"
    elif new.exists():
        assert not verify(new), folder


def flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_resume_removes_snapshots_of_later_steps(run: Path, world: World, digits: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    missing = ValidationConfig(data=str(tmp_path / "missing"))
    with pytest.raises(FastdiffError, match="missing"):
        train(_tracking(digits, tmp_path / "run", 1, validation=missing), launch(0), world)
    assert len(committed(tmp_path / "run" / "ema")) == STEPS // 2, "a start that fails loses nothing"
    train(_tracking(digits, tmp_path / "run", 1), launch(0), world)
    assert not committed(tmp_path / "run" / "ema")


def test_a_rewind_removes_the_snapshots_of_the_course_that_it_leaves(world: World, tmp_path: Path) -> None:
    """From the spike in step 11 back to step 8; snapshots of both courses would make an average of neither."""
    data = marred(tmp_path / "data", {in_step(11): 100.0})
    averages = EmaConfig(rates=(), power_stds=STDS, snapshot_every=2)
    train(spiky(data, tmp_path / "run", 14, divergence__policy="rewind", ema=averages), launch(0), world)
    assert [line["rewound_to"] for line in lines(tmp_path / "run") if "rewound_to" in line] == [8]
    left = [step_of(folder) for folder in committed(tmp_path / "run" / "ema")]
    assert left == [14, 12, 8, 6, 4, 2]


def test_a_std_cannot_be_added_at_a_resume(run: Path, world: World, digits: Path, tmp_path: Path) -> None:
    """It would be no average of the whole course; an average of constant rate can, and a std can be dropped."""
    shutil.copytree(run, tmp_path / "run")
    added = _tracking(digits, tmp_path / "run", STEPS + 1, stds=(*STDS, 0.2))
    allowed = launch(0, allow_change=("ema.power_stds",))
    with pytest.raises(ConfigError, match=r"stds \[0.05, 0.07, 0.1\]; --ema.power_stds 0.2 would miss"):
        train(added, allowed, world)
    train(_tracking(digits, tmp_path / "run", STEPS + 1, stds=STDS[:2]), allowed, world)
    assert newest(tmp_path / "run").ema_stds == STDS[:2]
