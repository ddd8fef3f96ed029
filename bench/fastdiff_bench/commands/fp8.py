"""``bench fp8``: the digits trained in FP8 and in bf16, by pairs, and whether their losses differ.

Runs of a seed have equal data, noise and initial weights; they differ in how the blocks multiply. At the end each is
validated on unseen digits under the same noise. The loss in FP8 minus that in bf16 is given in percent of the latter,
with its standard error over the seeds, for all samples and for each noise level; the probabilities of the levels are
corrected for their number (Holm). Controls, whose scales clip the largest values, show what the test finds.

A CPU emulates FP8. Each run is a process of its own. A second start in the same folder skips finished runs; the record
names the commit of each.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from fastdiff.data.encoding.builtin import encode_digits
from fastdiff.evaluation.comparison import MeasuredRun
from fastdiff_bench import BenchError
from fastdiff_bench.arguments import Commands, add_output, open_log
from fastdiff_bench.measure.paired_runs import HEAD, Pair, Tested, differences, of_other_code, run_all, tested
from fastdiff_bench.records.fingerprint import ROOT
from fastdiff_bench.records.record import Fact, Log, Measurement
from fastdiff_bench.records.tables import table
from fastdiff_bench.trainers import in_fp8
from fastdiff_bench.trainers.in_fp8 import ARITHMETICS, BASELINE, Trained, Trial

_BATCH = 32
"""Samples of a step."""


def add(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("fp8", description=__doc__)
    parser.add_argument("--width", type=int, nargs="+", default=[384], help="features per token; default: 384")
    parser.add_argument("--depth", type=int, default=3, help="blocks, all of them in FP8; default: %(default)s")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of a run; default: %(default)s")
    parser.add_argument("--seeds", type=int, default=5, help="pairs of each width; default: %(default)s")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=ARITHMETICS,
        metavar="NAME",
        help=f"some of: {'; '.join(ARITHMETICS)}; default: all",
    )
    parser.add_argument(
        "--processes", type=int, default=1, help="runs at a time, a thread of torch each; default: %(default)s"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder of the data and the runs; default: runs/fp8, --smoke: runs/fp8-smoke"
    )
    add_output(parser, "a few steps of a tiny network", "<machine>/<date>_fp8")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    if given.seeds < 2:
        raise BenchError(f"--seeds {given.seeds}: a standard error takes at least 2")
    root = (given.folder or ROOT / "runs" / ("fp8-smoke" if given.smoke else "fp8")).resolve()
    for split in ("train", "test"):
        if not (root / split / "dataset.json").is_file():
            encode_digits(root / split, split=split)
    wanted = trials(given)
    with open_log(given, "fp8") as log:
        done = run_all(
            "fp8",
            wanted,
            finished=partial(in_fp8.finished, root=root),
            run=partial(in_fp8.run, root=root),
            processes=given.processes,
            log=log,
            rows=measured,
            words=_words,
        )
        report(done, root, log)
        for line in of_other_code([one.commit for one in done], log.fingerprint.git):
            print(line)
        return int(len(done) < len(wanted))


def trials(given: argparse.Namespace) -> list[Trial]:
    """Return the runs, those of a width first, and of these the ones of an arithmetic."""
    depth, steps, batch = (1, 18, 16) if given.smoke else (given.depth, given.steps, _BATCH)
    chosen = [name for name in ARITHMETICS if name == BASELINE or name in (given.only or ARITHMETICS)]
    return [
        Trial(width, depth, steps, batch, seed, name)
        for width in ([64] if given.smoke else given.width)
        for name in chosen
        for seed in range(2 if given.smoke else given.seeds)
    ]


def measured(one: Trained) -> Iterator[Measurement]:
    """Yield the measurements of a run."""
    trial = one.trial
    row = partial(Measurement.of, "fp8", trial.case, unit="1", better="lower")
    facts: dict[str, Fact] = {"seed": trial.seed, "commit": one.commit}
    yield row(
        trial.arithmetic, f"validation loss, seed {trial.seed}", value=float(one.validated.loss.mean()),
        facts=facts | {"samples": len(one.validated.loss)},
    )  # fmt: skip
    for weights, name, error in _errors(one):
        yield row(name, f"gradient error, {weights} weights, seed {trial.seed}", value=error, facts=facts)


def _errors(one: Trained) -> Iterator[tuple[str, str, float]]:
    """Yield weights, arithmetic and relative error of the gradients."""
    for weights, errors in one.gradient_errors.items():
        for name, error in errors.items():
            yield weights, name, error


def comparisons(done: Sequence[Trained], root: Path) -> dict[tuple[str, str, str], Tested]:
    """Test every arithmetic that has at least two pairs, by case, arithmetic and the one that it is compared with."""
    runs = {(one.trial.case, one.trial.arithmetic, one.trial.seed): one for one in done}
    pairs: dict[tuple[str, str, str], list[tuple[Trained, Trained]]] = {}
    for (case, name, seed), one in runs.items():
        for other in ARITHMETICS[name].against:
            if (case, other, seed) in runs:
                pairs.setdefault((case, name, other), []).append((runs[case, other, seed], one))
    return {key: tested([_measured(pair, root) for pair in found]) for key, found in pairs.items() if len(found) > 1}


def _measured(pair: tuple[Trained, Trained], root: Path) -> Pair:
    a, b = (MeasuredRun(one.trial.folder(root), one.validated) for one in pair)
    return a, b


def report(done: Sequence[Trained], root: Path, log: Log) -> None:
    """Write and print the tests."""
    found = comparisons(done, root)
    for (case, name, other), one in found.items():
        log.write(*differences("fp8", case, name, other, one))
    head = ("case", "", "against", *HEAD, "")
    rows = [(case, name, other, *one.cells, _verdict(name, one)) for (case, name, other), one in found.items()]
    print()
    print(table([head, *rows], "<<<>>>>><"))
    errors = [
        (one.trial.case, name, f"{weights}, seed {one.trial.seed}", f"{error:.4f}")
        for one in done
        for weights, name, error in _errors(one)
    ]
    print()
    print(table([("case", "", "weights", "gradient error"), *errors], "<<<>"))


def _verdict(name: str, one: Tested) -> str:
    if ARITHMETICS[name].is_control:
        return "found" if one.differs else "not found"
    return ", ".join(one.faults) or "no difference found"


def _words(one: Trained) -> str:
    return f"{one.trial.case}, seed {one.trial.seed}, {one.trial.arithmetic}: {one.validated.loss.mean():.5f}"
