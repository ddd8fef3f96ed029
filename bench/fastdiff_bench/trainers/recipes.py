"""Training methods side by side on tiny tasks: each run in a process of its own, at a learning rate of a sweep."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, cast

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.routing import RoutingName
from fastdiff.config.optimizers.adamw import AdamWConfig
from fastdiff.config.optimizers.muon import MuonConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import read_record
from fastdiff.config.sections.data import ValidationConfig
from fastdiff.config.sections.objective import FlowConfig
from fastdiff.config.sections.optim import OptimConfig
from fastdiff.evaluation import validation_files
from fastdiff.evaluation.digits import evaluate_digits, evaluation_labels
from fastdiff.evaluation.validation_files import Validated
from fastdiff.files import publish
from fastdiff.json_lines import read_records
from fastdiff.models.fused import Fused, Matrix
from fastdiff.sampling.run import Run
from fastdiff_bench.measure.speed_up import Curve
from fastdiff_bench.trainers import aligned_digits, crops, pixel_crops, teachers, tiny_run
from fastdiff_bench.trainers.features import in_velocity

HELD_OUT = "held-out"
TRAIN = "train"
"""Folders of data sets."""
SWEEP = 1000
"""Seed of the runs that choose a learning rate; no comparison has it, as the chosen rate suits its noise."""
BASELINE = "AdamW"
_VALIDATIONS = 20
"""Validations of a run, evenly spread."""
_TEACHER_STEPS, _FEW = 200, 8
"""Optimizer steps of a teacher, also of one for a smoke run."""
_RESULT = "recipe.json"
"""File of a run folder, written last."""


@dataclass(frozen=True, slots=True)
class Task:
    """Data, network and length of the runs."""

    network: DiTConfig
    steps: int
    batch: int
    held_out: int
    """Samples of a validation."""
    prepare: Callable[[Path, bool], None]
    """Writes the data sets below a folder, fewer samples if the flag is set."""
    measure: Callable[[Run, Path], dict[str, float]]
    """Draws with a trained network and measures, beside the data."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A training method."""

    optim: Callable[[float], OptimConfig]
    """Optimizer at a learning rate."""
    rates: tuple[float, ...]
    """Learning rates of the sweep, ascending; it goes on beyond an end that is best."""
    change: Callable[[RunConfig], RunConfig] = field(default=lambda config: config)
    tasks: tuple[str, ...] = ("digits", "crops")
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered around the training."""


def _digits(root: Path, few: bool) -> None:
    side, steps = TASKS["digits"].network.side, _FEW if few else _TEACHER_STEPS
    aligned_digits.prepare(root, side=side, teacher_steps=steps, parts=(TRAIN, HELD_OUT))


def _draw_digits(run: Run, root: Path) -> dict[str, float]:
    labels = evaluation_labels()
    found = evaluate_digits(run.draw(labels, run.sampler(), progress=False), labels)
    return {"accuracy": found["accuracy"], "frechet distance": found["frechet_distance"]}


def _crops(root: Path, few: bool) -> None:
    side, steps, stride = TASKS["crops"].network.side, *((_FEW, 48) if few else (_TEACHER_STEPS, 8))
    pixel_crops.prepare(root, stride=stride, side=side, teacher_steps=steps, parts=(TRAIN, HELD_OUT))


def _draw_crops(run: Run, root: Path) -> dict[str, float]:
    return {"frechet distance": pixel_crops.distance_of_drawn(run, root / "images" / HELD_OUT)}


TASKS = {
    "digits": Task(
        network=DiTConfig(depth=4, hidden=64, heads=2, patch=2, channels=1, size=8, classes=10),
        steps=400,
        batch=32,
        held_out=1024,
        prepare=_digits,
        measure=_draw_digits,
    ),
    "crops": Task(
        network=DiTConfig(
            depth=4, hidden=64, heads=2, patch=2, channels=3, size=crops.PIXELS, classes=len(crops.CLASSES)
        ),
        steps=200,
        batch=16,
        held_out=256,
        prepare=_crops,
        measure=_draw_crops,
    ),
}
"""By name: 8 x 8 digits, and 32 x 32 crops of scikit-learn's two photos, which have 256 tokens."""
_ADAMW_RATES = (2e-3, 4e-3, 8e-3, 1.6e-2)
_MUON_RATES = (4e-3, 8e-3, 1.6e-2, 3.2e-2)
_OF_OTHERS = 0.5
"""Learning rate of AdamW, for the parameters that are no matrices, over that of Muon."""


def _adamw_at(rate: float) -> OptimConfig:
    return AdamWConfig(lr=rate)


def _muon_at(rate: float) -> OptimConfig:
    return MuonConfig(lr=rate, adamw_lr=_OF_OTHERS * rate)


def _x_prediction(config: RunConfig) -> RunConfig:
    return replace(config, objective=FlowConfig(prediction="x0"))


def _mup(config: RunConfig) -> RunConfig:
    """MuP at its base width: initial weights and rates are those that would carry over to wider networks."""
    model = cast(DiTConfig, config.model)
    return replace(config, model=replace(model, base_width=model.hidden))


def _aligned(config: RunConfig) -> RunConfig:
    """Align the second block with the stored features, at the weight of REPA."""
    model = cast(DiTConfig, config.model)
    aligned = replace(model, aligned_width=teachers.WIDTH, aligned_block=2, aligned_hidden=4 * model.hidden)
    return replace(config, model=aligned, objective=FlowConfig(alignment_weight=0.5))


def _routed(config: RunConfig, name: RoutingName) -> RunConfig:
    """Leave tokens out of all blocks but the first and the last, in all but the last quarter of the steps."""
    model = cast(DiTConfig, config.model)
    routed = replace(model, routing=name, routing_from=1, routing_to=model.depth - 2, dense_share=0.25)
    return replace(config, model=routed)


@contextmanager
def _fused_as_one() -> Iterator[None]:
    """Let Muon orthogonalise each weight as one matrix, whatever it holds."""
    before = Fused.cut
    Fused.cut = lambda self, shape: Matrix((shape[0],), 1, prod(shape[1:]))  # type: ignore[method-assign]
    try:
        yield
    finally:
        Fused.cut = before  # type: ignore[method-assign]


ARMS = {
    BASELINE: Arm(_adamw_at, _ADAMW_RATES),
    "8-bit AdamW": Arm(lambda rate: AdamWConfig(name="adamw8bit", lr=rate), _ADAMW_RATES),
    "Muon of fused weights": Arm(_muon_at, _MUON_RATES, around=_fused_as_one),
    "chunked Muon": Arm(_muon_at, _MUON_RATES),
    f"{BASELINE} + alignment": Arm(_adamw_at, _ADAMW_RATES, _aligned),
    "chunked Muon + alignment": Arm(_muon_at, _MUON_RATES, _aligned),
    "x-prediction": Arm(_adamw_at, _ADAMW_RATES, _x_prediction),
    "TREAD": Arm(_adamw_at, _ADAMW_RATES, partial(_routed, name="tread"), ("crops",)),
    "SPRINT": Arm(_adamw_at, _ADAMW_RATES, partial(_routed, name="sprint"), ("crops",)),
    "muP": Arm(_adamw_at, _ADAMW_RATES, _mup),
}
"""By name."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A run: equal order of the samples, noise and initial weights for equal seeds."""

    task: str
    arm: str
    rate: float
    seed: int
    steps: int
    tiny: bool = False
    """A network of few narrow blocks."""

    @property
    def case(self) -> str:
        """What runs that are compared have in common, but for the seed."""
        return f"{self.task}, {self.steps} steps of {TASKS[self.task].batch}"

    @property
    def name(self) -> str:
        """The method and its learning rate."""
        return f"{self.arm}, lr {self.rate:g}"

    @property
    def is_compared(self) -> bool:
        """Whether it belongs to the comparison, not to the choice of a rate."""
        return self.seed != SWEEP

    def folder(self, root: Path) -> Path:
        """Return the folder of the run."""
        return tiny_run.folder_of(self, root / "runs")

    def config(self, root: Path) -> RunConfig:
        """Return the run on the data below ``root``."""
        task, arm, data = TASKS[self.task], ARMS[self.arm], root / self.task
        network = replace(task.network, depth=3, hidden=32, heads=2) if self.tiny else task.network
        every = max(1, self.steps // _VALIDATIONS)
        common = tiny_run.config_of(
            self.folder(root), network, arm.optim(self.rate), data=data / TRAIN,
            validation=ValidationConfig(data=str(data / HELD_OUT), samples=task.held_out, every=every),
            steps=self.steps, batch=task.batch, seed=self.seed,
        )  # fmt: skip
        return arm.change(replace(common, objective=FlowConfig()))


@dataclass(frozen=True, slots=True)
class Trained:
    """What a finished run leaves."""

    trial: Trial
    curve: Curve
    """Held-out losses of the averaged weights: squared errors of the velocity."""
    validated: Validated
    """The losses at the end, by sample."""
    ms_per_step: float
    """Median over the records of the log."""
    peak_gib: float
    """Largest memory, validations included: on a CPU of the whole process."""
    drawn: Mapping[str, float]
    """Measures of drawn samples, of compared runs."""
    commit: str | None
    """Of the code that trained it; None: not known."""


def prepare(task: str, root: Path, *, few: bool) -> None:
    """Write the data sets of a task below ``root``, as far as they are not there; ``few``: less of them."""
    TASKS[task].prepare(root / task, few)


def teacher_of(task: str, root: Path) -> dict[str, float]:
    """Return how the teacher of a task was trained, and its held-out ``accuracy``."""
    return teachers.training_of(root / task / "teacher")


def finished(trial: Trial, root: Path) -> Trained | None:
    """Read what a run has left; None: it is not finished."""
    folder = trial.folder(root)
    if not (folder / _RESULT).is_file():
        return None
    steps = validation_files.steps_of(folder)
    found = [in_velocity(validation_files.read(folder, step)) for step in steps]
    logged = read_records(folder / "metrics.jsonl")
    return Trained(
        trial,
        Curve(steps, [float(one.loss.mean()) for one in found]),
        found[-1],
        statistics.median(line["step_ms"] for line in logged),
        max(line["peak_gib"] for line in logged),
        json.loads((folder / _RESULT).read_text(encoding="utf-8")),
        read_record(folder)["git"],
    )


def run(trial: Trial, root: Path) -> None:
    """Train to the end, or what is left of it; draw if it is compared; then remove the checkpoints."""
    folder = trial.folder(root)
    with ARMS[trial.arm].around():
        tiny_run.run(trial.config(root))
    drawn: dict[str, Any] = TASKS[trial.task].measure(Run(folder), root / trial.task) if trial.is_compared else {}
    publish(folder / _RESULT, json.dumps(drawn).encode())
    shutil.rmtree(folder / "checkpoints")  # 16 bytes per parameter
