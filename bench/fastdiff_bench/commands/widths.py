"""``bench widths``: does the best learning rate of a small DiT serve a wide one, with muP and without it?

First a coordinate check: how much the outputs of the network's parts change in three steps, by width; under muP the
exponent of the width is about 0. Then the digits are trained at every width and learning rate, beyond the end of the
rates as long as the end is best, and the best rate of each width is compared with that of the widest. Runs of equal
seeds have equal samples and noise, and are validated under the same noise, on digits of other forms.

Each run is a process of its own. A second start in the same folder skips finished runs; the record names the commit of
each. Two pictures are written beside the record.
"""

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from fastdiff_bench import BenchError
from fastdiff_bench.arguments import Commands, add_output, open_log
from fastdiff_bench.measure.best_rate import BEYOND, best_rate, beyond
from fastdiff_bench.measure.coordinates import Changes, measured, slopes
from fastdiff_bench.measure.paired_runs import of_other_code, run_all
from fastdiff_bench.page.width_charts import draw_changes, draw_sweeps
from fastdiff_bench.records.fingerprint import ROOT
from fastdiff_bench.records.record import Fact, Log, Measurement
from fastdiff_bench.records.tables import table
from fastdiff_bench.trainers import widths
from fastdiff_bench.trainers.widths import HEAD, NETWORK, Trained, Trial

_RATES = tuple(2.0**-exponent for exponent in (9, 8, 7, 6, 5))
_CHECKED_STEPS = 3
_CHECKED_RATE = 2e-3
_Losses = dict[str, dict[int, dict[float, float]]]
"""Mean held-out loss over the seeds, by method, width and learning rate."""


def add(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("widths", description=__doc__)
    parser.add_argument(
        "--widths", type=int, nargs="+", default=[64, 128, 256, 512],
        help=f"multiples of {HEAD}, a head; the first is the base of muP; default: 64 128 256 512",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=100, help="of a run; default: %(default)s")
    parser.add_argument("--seeds", type=int, default=1, help="runs at each rate; default: %(default)s")
    parser.add_argument(
        "--processes", type=int, default=1, help="runs at a time, a thread of torch each; default: %(default)s"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder of the data and the runs; default: runs/widths, --smoke: runs/widths-smoke",
    )
    add_output(parser, "ten steps at two narrow widths and two rates", "<machine>/<date>_widths")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    chosen = [HEAD, 2 * HEAD] if given.smoke else sorted(set(given.widths))
    if len(chosen) < 2 or any(width < HEAD or width % HEAD for width in chosen):
        raise BenchError(f"--widths {' '.join(map(str, given.widths))}: expected two or more multiples of {HEAD}")
    if given.seeds < 1 or given.steps < 10:
        raise BenchError(f"--seeds {given.seeds} --steps {given.steps}: at least 1 and 10")
    root = (given.folder or ROOT / "runs" / ("widths-smoke" if given.smoke else "widths")).resolve()
    widths.prepare(root)
    with open_log(given, "widths") as log:
        _check(chosen, log)
        done = _sweep(chosen, given, root, log)
        report(done, chosen, log)
        for line in of_other_code([one.commit for one in done], log.fingerprint.git):
            print(line)
    return int(any(math.isinf(one.loss) for one in done))


def _check(chosen: Sequence[int], log: Log) -> None:
    """Write, print and draw the coordinate check."""
    found: dict[str, dict[int, Changes]] = {}
    for method, base in (("muP", chosen[0]), ("one rate", 0)):
        configs = [widths.at_width(NETWORK, width, base) for width in chosen]
        found[method] = measured(configs, steps=_CHECKED_STEPS, lr=_CHECKED_RATE)
    exponents = {method: slopes(changes) for method, changes in found.items()}
    case = f"widths {chosen[0]} to {chosen[-1]}, {_CHECKED_STEPS} steps"
    for method, parts in exponents.items():
        facts: dict[str, Fact] = {"lr": _CHECKED_RATE}
        for part, value in parts.items():
            quantity = f"exponent of the width in the change, {part}"
            log.write(Measurement.of("widths", case, method, quantity, "1", value, "neither", facts=facts))
    rows = [(part, *(f"{parts[part]:+.3f}" for parts in exponents.values())) for part in exponents["muP"]]
    print(table([("exponent of the width in the change", *exponents), *rows], "<>>"))
    picture = log.path.with_name(f"{log.path.stem}-coordinates.png")
    draw_changes(found, picture)
    print(picture, flush=True)


def _sweep(chosen: Sequence[int], given: argparse.Namespace, root: Path, log: Log) -> list[Trained]:
    """Train at all rates, and beyond them while an end is best; the loss of a run that failed is infinite."""
    steps, seeds = (10, 1) if given.smoke else (given.steps, given.seeds)
    rates = {(width, base): {*_RATES[-2 if given.smoke else 0 :]} for base in (chosen[0], 0) for width in chosen}
    done: list[Trained] = []
    for _ in range(1 if given.smoke else 1 + BEYOND):
        wanted = [
            Trial(width, base, rate, seed, steps)
            for (width, base), own in sorted(rates.items())  # the narrow ones, which are fast, first
            for rate in sorted(own)
            for seed in range(seeds)
        ]
        tried = {one.trial for one in done}
        new = [trial for trial in wanted if trial not in tried]
        found = run_all(
            "widths",
            new,
            finished=partial(widths.finished, root=root),
            run=partial(widths.run, root=root),
            processes=given.processes,
            log=log,
            rows=_rows,
            words=lambda one: f"{one.trial.name}, seed {one.trial.seed}: {one.loss:.5f}",
        )
        failed = set(new) - {one.trial for one in found}
        done += [*found, *(Trained(trial, math.inf, None) for trial in failed)]
        for (width, base), own in rates.items():
            own |= beyond(losses_of([one for one in done if (one.trial.width, one.trial.base) == (width, base)]))
    return done


def _rows(one: Trained) -> Iterator[Measurement]:
    trial = one.trial
    facts: dict[str, Fact] = {
        "width": trial.width, "base_width": trial.base, "lr": trial.rate, "seed": trial.seed, "commit": one.commit
    }  # fmt: skip
    quantity = f"validation loss, seed {trial.seed}"
    yield Measurement.of("widths", trial.case, trial.name, quantity, "1", one.loss, "lower", facts=facts)


def losses_of(done: Sequence[Trained]) -> dict[float, float]:
    """Return the mean loss by learning rate, of runs of one width; infinite: one of them failed."""
    rates = sorted({one.trial.rate for one in done})
    return {rate: statistics.mean(one.loss for one in done if one.trial.rate == rate) for rate in rates}


def report(done: Sequence[Trained], chosen: Sequence[int], log: Log) -> None:
    """Write, print and draw the best rates."""
    found: _Losses = {}
    for method in sorted({one.trial.method for one in done}):
        own = [one for one in done if one.trial.method == method]
        found[method] = {
            width: losses_of(of_width) for width in chosen if (of_width := [r for r in own if r.trial.width == width])
        }
    rows = []
    for method, by_width in found.items():
        best = {width: best_rate(losses) for width, losses in by_width.items()}
        widest = best.get(chosen[-1])
        for width, rate in best.items():
            ratio = None if rate is None or widest is None else rate / widest
            case = done[0].trial.case
            name = f"{method}, width {width}"
            facts: dict[str, Fact] = {"width": width, "rates": len(by_width[width])}
            for quantity, value in (("best learning rate", rate), ("best rate over that of the widest", ratio)):
                if value is not None:
                    log.write(Measurement.of("widths", case, name, quantity, "1", value, "neither", facts=facts))
            lowest = f"{min(by_width[width].values()):.4f}"
            cells = ("at an end" if rate is None else f"{rate:.5f}", "" if ratio is None else f"{ratio:.2f}")
            rows.append((method, str(width), *cells, lowest))
    print()
    print(table([("", "width", "best rate", "over the widest's", "lowest loss"), *rows], "<>>>>"))
    picture = log.path.with_suffix(".png")
    draw_sweeps(found, picture)
    print(picture)
