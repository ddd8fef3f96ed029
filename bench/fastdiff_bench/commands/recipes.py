"""``bench recipes``: training methods side by side, each at its own learning rate, and what their speed-up is.

The tasks are 8 x 8 digits and 32 x 32 crops of scikit-learn's two photos, of which the left halves are for training and
the right ones are held out. Every method first sweeps its learning rate: at the rates that it names, and beyond the end
of them as long as the end is best. Then it trains at the best one with seeds that the sweep has not seen. Runs of a
seed have equal samples, noise and initial weights, and are validated under the same noise, as the squared error of the
velocity. The speed-up is the steps of the baseline over those of the method to the same loss. A method is called a gain
if two standard errors below the mean speed-up are still above 1.15 and no seed is below 0.95.

The teacher of the alignment is a small ResNet that the benchmark trains on labels of the training half: which digit, or
which photo and height of a crop. A teacher that saw no labels would help less. All methods train on the same data, so
those without alignment read its features as well: the times of steps, and the speed-ups in time, leave that reading out
of the cost of an alignment; ``bench alignment`` measures it.

Each run is a process of its own. A second start in the same folder skips finished runs; the record names the commit of
each.
"""

import argparse
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from fastdiff.evaluation.comparison import MeasuredRun
from fastdiff_bench import BenchError
from fastdiff_bench.arguments import Commands, add_output, open_log
from fastdiff_bench.measure.best_rate import BEYOND, beyond
from fastdiff_bench.measure.paired_runs import Tested, differences, of_other_code, run_all, tested
from fastdiff_bench.measure.speed_up import SpeedUp, speed_up
from fastdiff_bench.page.recipe_curves import draw
from fastdiff_bench.records.fingerprint import ROOT
from fastdiff_bench.records.record import Better, Fact, Log, Measurement
from fastdiff_bench.records.tables import table
from fastdiff_bench.trainers import recipes
from fastdiff_bench.trainers.recipes import ARMS, BASELINE, SWEEP, TASKS, Trained, Trial

Train: TypeAlias = Callable[[Sequence[Trial]], list[Trained]]


def add(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("recipes", description=__doc__)
    parser.add_argument("--task", nargs="+", choices=TASKS, default=[*TASKS], help="default: all")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=ARMS,
        metavar="NAME",
        help=f"some of: {'; '.join(ARMS)}; default: all that a task has, always with {BASELINE}",
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each method; default: %(default)s")
    parser.add_argument(
        "--processes", type=int, default=1, help="runs at a time, a thread of torch each; default: %(default)s"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder of the data and the runs; default: runs/recipes, --smoke: runs/recipes-smoke",
    )
    add_output(parser, "a few steps of tiny networks, at two rates", "<machine>/<date>_recipes")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    if given.seeds < 2:
        raise BenchError(f"--seeds {given.seeds}: a standard error takes at least 2")
    root = (given.folder or ROOT / "runs" / ("recipes-smoke" if given.smoke else "recipes")).resolve()
    with open_log(given, "recipes") as log:
        train = partial(
            run_all,
            "recipes",
            finished=partial(recipes.finished, root=root),
            run=partial(recipes.run, root=root),
            processes=given.processes,
            log=log,
            rows=measured,
            words=_words,
        )
        failed = 0
        done: list[Trained] = []
        for task in given.task:
            recipes.prepare(task, root, few=given.smoke)
            log.write(_of_teacher(task, root))
            swept, missing = sweep(task, given, train)
            wanted = compared(task, best_rates(swept), given)
            found = train(wanted)
            failed += missing + len(wanted) - len(found)
            done += [*swept, *found]
        report(done, root, log)
        for line in of_other_code([one.commit for one in done], log.fingerprint.git):
            print(line)
    return int(failed > 0)


def sweep(task: str, given: argparse.Namespace, train: Train) -> tuple[list[Trained], int]:
    """Train at the rates of every method, and beyond them while an end is best; return what is done, and failures."""
    rates = {arm: set(ARMS[arm].rates[: 2 if given.smoke else None]) for arm in arms(task, given.only)}
    done: list[Trained] = []
    tried: set[Trial] = set()
    for _ in range(1 if given.smoke else 1 + BEYOND):
        wanted = [
            Trial(task, arm, rate, SWEEP, _steps(task, given), given.smoke)
            for arm, chosen in rates.items()
            for rate in sorted(chosen)
        ]
        new = [trial for trial in wanted if trial not in tried]
        if not new:
            break
        tried.update(new)
        done += train(new)
        losses = {(one.trial.arm, one.trial.rate): one.curve.last for one in done}
        for arm, chosen in rates.items():
            chosen |= beyond({rate: losses.get((arm, rate), math.inf) for rate in chosen})
    return done, len(tried) - len(done)


def arms(task: str, only: Sequence[str] | None) -> list[str]:
    """Return the methods of a task, the baseline first."""
    return [name for name, arm in ARMS.items() if task in arm.tasks and (not only or name in only or name == BASELINE)]


def best_rates(swept: Sequence[Trained]) -> dict[str, float]:
    """Return the rate of the lowest final loss, by method."""
    found = {one.trial.arm: one for one in sorted(swept, key=lambda one: one.curve.last, reverse=True)}
    return {arm: one.trial.rate for arm, one in found.items()}


def compared(task: str, rates: Mapping[str, float], given: argparse.Namespace) -> list[Trial]:
    """Return the runs of the comparison, those of a seed together."""
    return [
        Trial(task, arm, rate, seed, _steps(task, given), given.smoke)
        for seed in range(given.seeds)
        for arm, rate in rates.items()
    ]


def _steps(task: str, given: argparse.Namespace) -> int:
    return 6 if given.smoke else TASKS[task].steps


def measured(one: Trained) -> Iterator[Measurement]:
    """Yield the measurements of a run."""
    trial = one.trial
    facts: dict[str, Fact] = {"lr": trial.rate, "seed": trial.seed, "commit": one.commit}
    row = partial(Measurement.of, "recipes", trial.case, trial.name, facts=facts)
    suffix = f", seed {trial.seed}" if trial.is_compared else ", sweep"
    yield row(f"validation loss{suffix}", "1", one.curve.last, "lower")
    yield row(f"time of a step{suffix}", "ms", one.ms_per_step, "lower")
    yield row(f"peak memory{suffix}", "GiB", one.peak_gib, "lower")
    for quantity, value in one.drawn.items():
        yield row(f"{quantity}{suffix}", "1", value, "higher" if quantity == "accuracy" else "lower")


def _of_teacher(task: str, root: Path) -> Measurement:
    found = recipes.teacher_of(task, root)
    facts: dict[str, Fact] = {"trained on": "labels of the training half", **found}
    name = "teacher, a ResNet that saw labels"
    return Measurement.of("recipes", task, name, "held-out accuracy", "1", found["accuracy"], "higher", facts=facts)


@dataclass(frozen=True, slots=True)
class Compared:
    """A method beside the baseline, over the seeds of both."""

    runs: Sequence[Trained]
    baselines: Sequence[Trained]

    @property
    def speed_up(self) -> SpeedUp:
        """In steps."""
        return SpeedUp([speed_up(a.curve, b.curve) for a, b in zip(self.baselines, self.runs, strict=True)])

    @property
    def cost(self) -> float:
        """Time of a step over that of the baseline, both at their medians over the seeds."""
        return statistics.median(one.ms_per_step for one in self.runs) / statistics.median(
            one.ms_per_step for one in self.baselines
        )

    @property
    def more_memory(self) -> float:
        """Peak memory beyond that of the baseline, in MiB, both at their medians over the seeds."""
        ours, theirs = (statistics.median(one.peak_gib for one in runs) for runs in (self.runs, self.baselines))
        return 1024 * (ours - theirs)

    def mean(self, quantity: str) -> float | None:
        """Return the mean of a measure of drawn samples; None: it is not measured."""
        found = [one.drawn[quantity] for one in self.runs if quantity in one.drawn]
        return statistics.mean(found) if found else None

    def tested(self, root: Path) -> Tested:
        """Test the final losses, over all samples and by noise level."""
        pairs = zip(self.baselines, self.runs, strict=True)
        return tested([(_measured(a, root), _measured(b, root)) for a, b in pairs])


def _measured(one: Trained, root: Path) -> MeasuredRun:
    return MeasuredRun(one.trial.folder(root), one.validated)


def comparisons(done: Sequence[Trained]) -> dict[tuple[str, str], Compared]:
    """Pair the runs of every method with the baseline's, by case and name with the rate; at least two seeds.

    A method that failed at a seed of the baseline is left out: the other seeds alone would flatter it.
    """
    ordered = sorted((one for one in done if one.trial.is_compared), key=lambda one: [*ARMS].index(one.trial.arm))
    runs = {(one.trial.case, one.trial.arm, one.trial.seed): one for one in ordered}
    pairs: dict[tuple[str, str], list[tuple[Trained, Trained]]] = {}
    for (case, _, seed), one in runs.items():
        if (base := runs.get((case, BASELINE, seed))) is not None:
            pairs.setdefault((case, one.trial.name), []).append((one, base))
    seeds = Counter(case for case, arm, _ in runs if arm == BASELINE)
    return {key: Compared(*zip(*found, strict=True)) for key, found in pairs.items() if len(found) == seeds[key[0]] > 1}


def report(done: Sequence[Trained], root: Path, log: Log) -> None:
    """Write, print and draw the comparisons."""
    found = comparisons(done)
    if not found:
        return
    for (case, name), one in found.items():
        log.write(*_rows(case, name, one))
        if one.runs[0].trial.arm != BASELINE:
            log.write(*differences("recipes", case, name, BASELINE, one.tested(root)))
    print()
    print(table([_HEAD, *(_cells(case, name, one) for (case, name), one in found.items())], "<<>>>>>>>>><"))
    print("step and in time: all methods read the features of the teacher, also those without alignment")
    picture = log.path.with_suffix(".png")
    draw({key: ([r.curve for r in one.runs], one.speed_up) for key, one in found.items()}, picture)
    print(picture)


def _rows(case: str, name: str, one: Compared) -> Iterator[Measurement]:
    gain, (low, high) = one.speed_up, one.speed_up.bounds
    facts: dict[str, Fact] = {
        "arm": one.runs[0].trial.arm, "lr": one.runs[0].trial.rate, "seeds": len(one.runs), "low": low, "high": high,
        "least": min(gain.values), "verdict": gain.verdict,
    }  # fmt: skip
    row = partial(Measurement.of, "recipes", case, name, facts=facts)
    yield row("speed-up in steps", "1", gain.mean, "higher")
    yield row("speed-up in time", "1", gain.mean / one.cost, "higher")
    yield row("time of a step over the baseline's", "1", one.cost, "lower")
    yield row("peak memory beyond the baseline's", "MiB", one.more_memory, "neither")
    yield row("validation loss", "1", statistics.mean(run.curve.last for run in one.runs), "lower")
    drawn: dict[str, Better] = {"accuracy": "higher", "frechet distance": "lower"}
    for quantity, better in drawn.items():
        if (value := one.mean(quantity)) is not None:
            yield row(quantity, "1", value, better)


_HEAD = ("case", "", "loss", "speed-up", "2 errors", "least", "step", "in time", "MiB", "accuracy", "distance", "")


def _cells(case: str, name: str, one: Compared) -> tuple[str, ...]:
    gain, (low, high) = one.speed_up, one.speed_up.bounds
    loss = statistics.mean(run.curve.last for run in one.runs)
    accuracy, distance = one.mean("accuracy"), one.mean("frechet distance")
    return (
        case, name, f"{loss:.4f}", f"{gain.mean:.2f}", f"{low:.2f} to {high:.2f}", f"{min(gain.values):.2f}",
        f"{one.cost:.2f}", f"{gain.mean / one.cost:.2f}", f"{one.more_memory:+.1f}",
        "" if accuracy is None else f"{accuracy:.3f}", "" if distance is None else f"{distance:.3f}",
        "" if one.runs[0].trial.arm == BASELINE else gain.verdict,
    )  # fmt: skip


def _words(one: Trained) -> str:
    kind = f"seed {one.trial.seed}" if one.trial.is_compared else "sweep"
    return f"{one.trial.case}, {one.trial.name}, {kind}: {one.curve.last:.5f}"
