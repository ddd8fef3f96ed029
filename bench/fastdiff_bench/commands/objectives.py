"""``bench objectives``: the digits trained with each objective, and the quality of the drawn digits.

Each run is the preset ``digits`` with the flags of one objective (docs/objectives.md), trained and evaluated one after
the other. A second start in the same folder skips finished runs and resumes killed ones; the trainer refuses a run that
was started with other flags. A picture beside the record shows the first ten digits of each run, a row per objective in
the order of the record.

With ``--seeds`` of two or more the runs train on digits of some forms and are validated on those of the others, and
each objective is compared with the first one: the squared error of x0, under the same noise, by pairs of equal seeds.
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.data.encoding.builtin import encode_digits
from fastdiff.evaluation.comparison import read_both
from fastdiff.evaluation.digits import evaluate_run, evaluation_labels
from fastdiff.sampling.image_grid import image_grid, save_picture
from fastdiff.sampling.run import Run
from fastdiff.version import PACKAGE
from fastdiff_bench import BenchError
from fastdiff_bench.arguments import Commands, add_output, open_log
from fastdiff_bench.measure.paired_runs import HEAD, differences, tested
from fastdiff_bench.records.fingerprint import ROOT
from fastdiff_bench.records.record import Better, Fact, Failure, Log, Measurement
from fastdiff_bench.records.tables import table

OBJECTIVES = {
    "epsilon, Min-SNR": "--objective.prediction epsilon --objective.schedule scaled_linear --objective.min_snr_gamma 5",
    "v": "--objective.prediction v",
    "x0": "--objective.prediction x0",
    "hybrid, learned range, importance": "--objective.prediction epsilon --objective.schedule scaled_linear "
    "--objective.variance learned_range --objective.loss rescaled_mse --model.learn_sigma "
    "--timesteps.density importance",
    "flow": "--objective.process flow --objective.prediction flow",
    "flow, logit-normal": "--objective.process flow --objective.prediction flow --timesteps.density logit_normal",
    "EDM": "--objective.process edm --objective.prediction edm --objective.sigma_data 0.75 --timesteps.mean -0.4 "
    "--timesteps.std 1.4",
    "flow, x0, logit-normal": "--objective.process flow --objective.prediction x0 --timesteps.density logit_normal",
}
"""Differences from the preset, as flags of the trainer."""

_SPLITS = ("train", "test")
"""Digits that pairs are trained on, and of other forms, that they are validated on."""
_SMOKE = "--samples 256 --model.depth 1 --model.hidden 32 --model.heads 2 --optim.warmup_steps 1"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a finished run."""

    steps: int
    accuracy: float
    distance: float
    images: Tensor
    """``[10, 1, 8, 8]``, a digit of each class."""


def add(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("objectives", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=OBJECTIVES, metavar="NAME", help=f"some of: {'; '.join(OBJECTIVES)}; default: all"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder of the data and the runs; default: runs/objectives, --smoke: runs/objectives-smoke",
    )
    parser.add_argument(
        "--seeds", type=int, default=1, help="runs of each; with two or more they are compared; default: %(default)s"
    )
    add_output(parser, "four steps of a smaller model", "<machine>/<date>_objectives")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    folder = (given.folder or ROOT / "runs" / ("objectives-smoke" if given.smoke else "objectives")).resolve()
    if given.seeds > 1:
        return _compare(given, folder)
    data = folder / "data"
    if not (data / "dataset.json").is_file():
        encode_digits(data)
    found: dict[str, Outcome | str] = {}
    for name in given.only or OBJECTIVES:
        flags = _flags(name, given)
        print(f"\n{len(found) + 1} of {len(given.only or OBJECTIVES)}: {name}", flush=True)
        try:
            found[name] = outcome(flags, data, folder / _folder_name(name))
        except BenchError as error:
            found[name] = str(error)
            print(error)
    with open_log(given, "objectives") as log:
        return report(found, log)


def _flags(name: str, given: argparse.Namespace) -> list[str]:
    return [*shlex.split(OBJECTIVES[name]), *shlex.split(_SMOKE if given.smoke else "")]


def _folder_name(objective: str) -> str:
    return objective.lower().replace(", ", "-").replace(" ", "-")


def _compare(given: argparse.Namespace, folder: Path) -> int:
    """Train every pair, and write and print the differences from the first objective."""
    first, *others = given.only or OBJECTIVES
    if not others:
        raise BenchError(f"--seeds {given.seeds} compares objectives; name two or more with --only")
    for split in _SPLITS:
        if not (folder / split / "dataset.json").is_file():
            encode_digits(folder / split, split=split)
    runs = {
        name: [_train_pair(_flags(name, given), seed, folder, _folder_name(name)) for seed in range(given.seeds)]
        for name in (first, *others)
    }
    rows = []
    with open_log(given, "objectives") as log:
        for name in others:
            found = tested([read_both(*both) for both in zip(runs[first], runs[name], strict=True)])
            log.write(*differences("objectives", "digits of other forms", name, first, found))
            rows.append((name, first, *found.cells))
    print()
    print(table([("objective", "against", *HEAD), *rows], "<<>>>>>"))
    return 0


def _train_pair(flags: Sequence[str], seed: int, folder: Path, name: str) -> Path:
    """Train one run of a pair and validate it at its end; return its folder."""
    run = folder / f"seed-{seed}" / name
    train, test = (str(folder / split) for split in _SPLITS)
    _train(
        "--preset", "digits", *flags, "--seed", str(seed), "--data.path", train, "--validation.data", test,
        "--output.sample_every", "0", "--output.folder", str(run),
    )  # fmt: skip
    return run


def outcome(flags: Sequence[str], data: Path, folder: Path) -> Outcome:
    """Train to the end, resuming the run in ``folder`` if there is one, and measure.

    Raises:
        BenchError: the trainer failed; it has printed the error.
    """
    _train("--preset", "digits", *flags, "--data.path", str(data), "--output.folder", str(folder))
    run = Run(folder)
    assert run.step is not None
    measured = evaluate_run(run)
    # The first of the measured images: an image depends on its seed, its number and its class.
    sampler = SamplerConfig(scheduler="dpmsolver++", steps=20, cfg=run.family.drawing(run.config.model).guidance)
    images = run.draw(evaluation_labels(1), sampler, progress=False)
    return Outcome(run.step, measured["accuracy"], measured["frechet_distance"], images)


def report(found: dict[str, Outcome | str], log: Log) -> int:
    """Write, print and draw the results; return the exit code, 1 if a run failed."""
    done = {name: one for name, one in found.items() if isinstance(one, Outcome)}
    for name, reason in found.items():
        if isinstance(reason, str):
            log.write(Failure(bench="objectives", case="digits", provider=name, reason=reason))
    for name, one in done.items():
        log.write(*_measurements(name, one))
    print()
    head = ("objective", "accuracy", "frechet distance")
    rows = [(name, f"{o.accuracy:.3f}", f"{o.distance:.2f}") for name, o in done.items()]
    print(table([head, *rows], "<>>"))
    if done:
        picture = log.path.with_suffix(".png")
        save_picture(picture, image_grid(torch.cat([one.images for one in done.values()]), rows=len(done)))
        print(picture)
    return int(len(done) < len(found))


def _measurements(name: str, one: Outcome) -> Iterator[Measurement]:
    values: tuple[tuple[str, str, float, Better], ...] = (
        ("accuracy", "1", one.accuracy, "higher"),
        ("frechet distance", "1", one.distance, "lower"),
    )
    facts: dict[str, Fact] = {"flags": OBJECTIVES[name], "steps": one.steps}
    for quantity, unit, value, better in values:
        yield Measurement.of(
            "objectives", f"digits, {one.steps} steps", name, quantity, unit, value, better, facts=facts
        )


def _train(*flags: str) -> None:
    """Run the trainer on one rank, with its output visible."""
    finish([sys.executable, str(PACKAGE / "train.py"), "--deepspeed_config", "zero1", *flags])


def finish(command: Sequence[str]) -> None:
    """Run a command to its end; BenchError if it failed, after it has printed the error."""
    if code := subprocess.run(command).returncode:
        raise BenchError(f"the trainer ended with exit code {code}")
