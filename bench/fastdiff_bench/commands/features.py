"""``bench features``: features as latents, stored in int8 and in bfloat16, and predicted as x or as velocity.

A tiny ``AutoencoderRAE`` is trained on 32 x 32 crops of scikit-learn's two photos; a DiT, narrower or wider than its 64
channels, is trained on the features. Runs of a seed have equal samples, noise and initial weights; they differ in the
storage of the features or in the prediction. At the end each is validated on crops of the other halves of the photos,
whose features are exact, under the same noise. The loss, the squared error of the velocity, is compared in percent,
with its standard error over the seeds, for all samples and for each noise level; the probabilities of the levels are
corrected for their number (Holm). A control, stored in 8 levels, shows what the test finds.

Each run is a process of its own. A second start in the same folder skips finished runs; the record names the commit of
each.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from fastdiff.evaluation.comparison import MeasuredRun
from fastdiff_bench import BenchError
from fastdiff_bench.arguments import Commands, add_output, open_log
from fastdiff_bench.measure.paired_runs import HEAD, Tested, differences, of_other_code, run_all, tested
from fastdiff_bench.records.fingerprint import ROOT
from fastdiff_bench.records.record import Fact, Log, Measurement
from fastdiff_bench.records.tables import table
from fastdiff_bench.trainers import crops, features
from fastdiff_bench.trainers.crops import CHANNELS, STORAGES
from fastdiff_bench.trainers.features import PREDICTIONS, Trained, Trial

BASELINE = "bfloat16"
_WIDTHS = (48, 128)
_DEPTH, _BATCH = 3, 64
_CONTROLLED = "velocity"
"""Prediction that is trained on the control, too."""


def add(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("features", description=__doc__)
    parser.add_argument(
        "--width",
        type=int,
        nargs="+",
        default=_WIDTHS,
        help=f"features per token, beside the {CHANNELS} channels of a latent; default: %(default)s",
    )
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of a run; default: %(default)s")
    parser.add_argument("--seeds", type=int, default=5, help="pairs of each comparison; default: %(default)s")
    parser.add_argument("--prediction", nargs="+", choices=PREDICTIONS, default=[*PREDICTIONS], help="default: both")
    parser.add_argument(
        "--processes", type=int, default=1, help="runs at a time, a thread of torch each; default: %(default)s"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder of the data and the runs; default: runs/features, --smoke: runs/features-smoke",
    )
    add_output(parser, "a few steps of a tiny network", "<machine>/<date>_features")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    if given.seeds < 2:
        raise BenchError(f"--seeds {given.seeds}: a standard error takes at least 2")
    root = (given.folder or ROOT / "runs" / ("features-smoke" if given.smoke else "features")).resolve()
    crops.prepare(root, stride=48 if given.smoke else 8, steps=8 if given.smoke else 300)
    wanted = trials(given)
    with open_log(given, "features") as log:
        log.write(_of_autoencoder(root))
        done = run_all(
            "features",
            wanted,
            finished=partial(features.finished, root=root),
            run=partial(features.run, root=root),
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
    """Return the runs, those of a width first, and of these the ones of a prediction and a storage."""
    depth, steps, batch = (1, 6, 16) if given.smoke else (_DEPTH, given.steps, _BATCH)
    return [
        Trial(width, depth, steps, batch, seed, prediction, storage)
        for width in ([32] if given.smoke else given.width)
        for prediction in given.prediction
        for storage in _storages(prediction)
        for seed in range(2 if given.smoke else given.seeds)
    ]


def _storages(prediction: str) -> list[str]:
    trained = [name for name in STORAGES if name != crops.EXACT]
    return [name for name in trained if prediction == _CONTROLLED or not STORAGES[name].is_control]


def measured(one: Trained) -> Iterator[Measurement]:
    """Yield the measurement of a run."""
    trial, loss = one.trial, one.validated.loss
    facts: dict[str, Fact] = {"seed": trial.seed, "commit": one.commit, "samples": len(loss)}
    quantity = f"validation loss, seed {trial.seed}"
    yield Measurement.of("features", trial.case, trial.name, quantity, "1", float(loss.mean()), "lower", facts=facts)


def _of_autoencoder(root: Path) -> Measurement:
    found = crops.reconstruction(root)
    return Measurement.of("features", "crops", "autoencoder", "held-out reconstruction", "dB", found, "higher")


def comparisons(done: Sequence[Trained], root: Path) -> dict[tuple[str, str, str], Tested]:
    """Test storages against ``BASELINE``, and x against velocity, by case and both names."""
    runs = {(one.trial.case, one.trial.name, one.trial.seed): one for one in done}
    pairs: dict[tuple[str, str, str], list[tuple[Trained, Trained]]] = {}
    for (case, name, seed), one in runs.items():
        for other in _against(one.trial):
            if (case, other, seed) in runs:
                pairs.setdefault((case, name, other), []).append((runs[case, other, seed], one))
    return {key: tested([_pair(a, b, root) for a, b in found]) for key, found in pairs.items() if len(found) > 1}


def _against(trial: Trial) -> Iterator[str]:
    if trial.storage != BASELINE:
        yield f"{trial.prediction}, {BASELINE}"
    elif trial.prediction != _CONTROLLED:
        yield f"{_CONTROLLED}, {BASELINE}"


def _pair(a: Trained, b: Trained, root: Path) -> tuple[MeasuredRun, MeasuredRun]:
    first, second = (MeasuredRun(one.trial.folder(root), one.validated) for one in (a, b))
    return first, second


def report(done: Sequence[Trained], root: Path, log: Log) -> None:
    """Write and print the tests."""
    found = comparisons(done, root)
    for (case, name, other), one in found.items():
        log.write(*differences("features", case, name, other, one))
    rows = [(case, name, other, *one.cells, _verdict(name, other, one)) for (case, name, other), one in found.items()]
    print()
    print(table([("case", "", "against", *HEAD, ""), *rows], "<<<>>>>><"))


def _verdict(name: str, other: str, one: Tested) -> str:
    (prediction, storage), (_, _) = name.split(", "), other.split(", ")
    if STORAGES[storage].is_control:
        return "found" if one.differs else "not found"
    if storage == BASELINE:
        return (
            f"{prediction} is {'lower' if one.total.mean < 0 else 'higher'}" if one.differs else "no difference found"
        )
    return ", ".join(one.faults) or "no difference found"


def _words(one: Trained) -> str:
    return f"{one.trial.case}, seed {one.trial.seed}, {one.trial.name}: {one.validated.loss.mean():.5f}"
