"""``bench scripts``: cost of a step, beside the published scripts that ``fastdiff compat`` translates.

Small networks on one thread, where the work around the network counts. Each script is rendered from its published form
(``trainers/scripts``); fastdiff runs with the flags that compat prints for it. They step in turns: once on one core
for the processor time, which covers all threads and child processes, so that batches that are read ahead count;
once on all cores for the time.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fastdiff.models.pretrained import tiny_pipeline
from fastdiff_bench import BenchError
from fastdiff_bench.arguments import Commands, add_cases, add_output, cases, open_log
from fastdiff_bench.measure.interleaved import Effort, Program, Result, run_interleaved
from fastdiff_bench.measure.session import Steps
from fastdiff_bench.measure.timing import Timing
from fastdiff_bench.records.record import Failure, Log, Measurement
from fastdiff_bench.records.tables import table
from fastdiff_bench.trainers import images
from fastdiff_bench.trainers.scripts import diffusers, iddpm, translated

_BENCH = "scripts"
_SIDE, _BATCH, _IMAGES = 32, 16, 64
_FULL = Effort(rounds=10, steps=10, warm_up=10)
_SMOKE = Effort(rounds=2, steps=1, warm_up=1)
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
_STEPS = str(1_000_000)
"""Length of the run; no benchmark reaches it."""


@dataclass(frozen=True, slots=True)
class _Case:
    """A script with its flags and its rendering."""

    script: str
    flags: tuple[str, ...]
    run: Callable[..., None]
    arguments: tuple[Any, ...]

    @property
    def name(self) -> str:
        """Name in the record."""
        return f"{self.script}, {_SIDE} pixels, batch {_BATCH}, fp32, 1 thread"


def add(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("scripts", description=__doc__)
    add_cases(parser, _CASES)
    parser.add_argument("--rounds", type=int, help=f"sessions of {_FULL.steps} steps; default: {_FULL.rounds}")
    add_output(parser, "two steps each", "<machine>/<date>_scripts")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    chosen, effort = cases(arguments, _CASES), _SMOKE if arguments.smoke else _FULL
    effort = replace(effort, rounds=effort.rounds if arguments.rounds is None else arguments.rounds)
    if effort.rounds < 2:
        raise BenchError(f"--rounds {effort.rounds}: at least 2")
    rows, code = [["script", "", "theirs ms", "fastdiff ms", "fastdiff / theirs"]], 0
    with tempfile.TemporaryDirectory(prefix="fastdiff-bench-scripts-") as folder, open_log(arguments, _BENCH) as log:
        for script in chosen:
            for quantity in _QUANTITIES:
                own = Path(folder) / f"{script}-{quantity.cores}"
                own.mkdir()
                case = _CASES[script](own)
                results = _measured(case, quantity, own, effort)
                rows.append(_written(log, case, quantity, results))
                code |= any(result.failure is not None for result in results.values())
        print(table(rows, "<<>>>"))
    return code


@dataclass(frozen=True, slots=True)
class _Quantity:
    """What is measured of the sessions of a program."""

    name: str
    cores: int | None
    """Cores that a program may use; None: all."""
    seconds: Callable[[Steps], float]
    """Of a step, from a session."""


_QUANTITIES = (
    _Quantity("processor time of a step", 1, lambda steps: steps.cpu_seconds / len(steps.seconds)),
    _Quantity("time of a step", None, lambda steps: sum(steps.seconds) / len(steps.seconds)),
)
"""Processor time on one core, because two threads of a program on one physical core would slow each other down."""


@contextmanager
def _on_cores(count: int | None) -> Iterator[None]:
    """Restrict this process, and those that it starts, to the first ``count`` of its cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _measured(case: _Case, quantity: _Quantity, folder: Path, effort: Effort) -> dict[str, Result]:
    translated.prepare(case.script, case.flags, folder)
    ours = Program("fastdiff", translated.run, (case.script, case.flags, folder), environment=_ONE_THREAD)
    theirs = Program("script", case.run, case.arguments, environment=_ONE_THREAD)
    with _on_cores(quantity.cores):
        return run_interleaved([ours, theirs], effort, device="cpu")


def _written(log: Log, case: _Case, quantity: _Quantity, results: dict[str, Result]) -> list[str]:
    """Write the quantity of both programs, and per round the ratio; return a row of the table."""
    name = quantity.name if quantity.cores is None else f"{quantity.name}, {quantity.cores} core"
    if failed := {name: result.failure for name, result in results.items() if result.failure is not None}:
        for provider, reason in failed.items():
            log.write(Failure(bench=_BENCH, case=case.name, provider=provider, reason=reason))
        return [case.script, name, *(failed.get(provider, "-") for provider in ("script", "fastdiff")), "-"]
    seconds = {provider: list(map(quantity.seconds, found.sessions)) for provider, found in results.items()}
    shares = [ours / theirs for ours, theirs in zip(seconds["fastdiff"], seconds["script"], strict=True)]
    kinds = {provider: (Timing.of(values), name, "ms", 1e3) for provider, values in seconds.items()}
    kinds["fastdiff over script"] = (Timing.of(shares), f"ratio of the {name}", "1", 1.0)
    for provider, (timing, written, unit, scale) in kinds.items():
        log.write(Measurement.of(_BENCH, case.name, provider, written, unit, timing, "lower", scale=scale))
    theirs, ours, ratio = (kinds[provider][0] for provider in ("script", "fastdiff", "fastdiff over script"))
    return [
        case.script, name, f"{1e3 * theirs.median:.1f}", f"{1e3 * ours.median:.1f}",
        "-" if log.fingerprint.smoke else f"{ratio.median:.3f} ({ratio.p20:.3f}-{ratio.p80:.3f})",
    ]  # fmt: skip


def _text_to_image(folder: Path, script: str = "t2i") -> _Case:
    pipeline, captioned = folder / "pipeline", folder / "captioned"
    if not pipeline.exists():
        tiny_pipeline.build(pipeline)
        images.write(captioned, _IMAGES, _SIDE)
    flags = (*diffusers.flags(script, pipeline, captioned, _SIDE, _BATCH), "--report_to", "none")
    rank = diffusers.RANK if script == "t2i-lora" else 0
    return _Case(script, flags, diffusers.run, (pipeline, captioned, _SIDE, _BATCH, rank))


def _iddpm(folder: Path) -> _Case:
    data = images.write(folder / "images", _IMAGES, _SIDE, captioned=False)
    flags = (
        "--data_dir", str(data), "--image_size", str(_SIDE), "--num_channels", "32", "--num_res_blocks", "1",
        "--learn_sigma", "True", "--dropout", "0.3", "--diffusion_steps", "1000", "--noise_schedule", "cosine",
        "--batch_size", str(_BATCH), "--save_interval", _STEPS, "--lr_anneal_steps", _STEPS,
    )  # fmt: skip
    config = translated.config("iddpm", flags)
    return _Case("iddpm", flags, iddpm.run, (config.model, config.objective, data, _BATCH))


_CASES: dict[str, Callable[[Path], _Case]] = {
    "t2i": _text_to_image,
    "t2i-lora": partial(_text_to_image, script="t2i-lora"),
    "iddpm": _iddpm,
}
