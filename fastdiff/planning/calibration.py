"""Basis of a prediction: shares of data sheets, or what a finished run or a record of ``bench step`` measured.

A measurement corrects passes and update by one factor each, or both by one where only the whole step is known. It holds
for other micro-batches, stages and counts of the same GPU within a tenth; on other GPUs it replaces the middle of the
assumed interval and keeps its width.
"""

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fastdiff.config import deepspeed as deepspeed_config
from fastdiff.config.command_line.config_file import from_mapping, with_optimizer
from fastdiff.config.run import RunConfig
from fastdiff.errors import ConfigError
from fastdiff.files import read_bounded
from fastdiff.planning.gpus import CPU, Gpus
from fastdiff.planning.rates import Interval
from fastdiff.planning.step_time import Factors, StepTime, Work, step_time
from fastdiff.run_files import read_inside

_LARGEST = 1 << 28
_WARM_UP = 1
"""Records of a log that are left out: the first has what happens once."""
_MEASURED = 0.1
"""Half of the interval around a prediction from a measurement on the same GPU."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured training step."""

    source: str
    """In words."""
    config: RunConfig
    deepspeed: deepspeed_config.DsConfig
    ranks: int
    device: str
    """Name that the driver reports, or ``cpu``."""
    seconds: float
    """Of a step."""
    passes: float | None = None
    """Of it forward and backward passes; None: unknown."""


@dataclass(frozen=True, slots=True)
class Basis:
    """What a prediction rests on."""

    words: str = "shares of the data sheets as measured on an H200"
    kind: str | None = None
    """GPU of the measurement; None: nothing was measured."""
    factors: Factors = field(default_factory=Factors)

    def step_time(self, work: Work, gpus: Gpus) -> StepTime:
        """Predict a step on this basis."""
        found = step_time(work, gpus, self.factors)
        if gpus.kind.name != self.kind:
            return found
        middle = found.whole.middle
        return replace(found, whole=Interval((1 - _MEASURED) * middle, middle, (1 + _MEASURED) * middle))


ASSUMED = Basis()


def calibrated(measured: Measured, work: Work, gpus: Gpus) -> Basis:
    """Return the basis that predicts a measured step exactly.

    Args:
        measured: the step.
        work: of a rank in it.
        gpus: on which it ran.
    """
    plain = step_time(work, gpus)
    device = plain.device.middle
    if measured.passes is None or measured.passes >= measured.seconds:
        factor = measured.seconds / device
        factors = Factors(factor, factor)
    else:
        beside = max(device - plain.passes - plain.update, 0.0)  # messages, which keep their links
        rest = max(measured.seconds - measured.passes - beside, 0.0)
        factors = Factors(measured.passes / plain.passes, rest / plain.update)
    # A measured step contains its host: where that was predicted to be slower, its processor is faster.
    host = min(1.0, measured.seconds / plain.host.middle) if gpus.kind is not CPU else 0.0
    words = f"{measured.source}: {1e3 * measured.seconds:.1f} ms per step on {gpus.name}"
    return Basis(words, gpus.kind.name, replace(factors, host=host))


def read(path: Path) -> Measured:
    """Return the measured step of a run folder, or the fastest of a record of ``bench step``; ConfigError: no step."""
    try:
        return _of_run(path) if path.is_dir() else _of_record(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--from {path}: {type(error).__name__} {error}; expected the folder of a run with run.json and "
            "metrics.jsonl, or a record of `fastdiff bench step`"
        ) from None


def _of_run(folder: Path) -> Measured:
    about = json.loads(read_inside(folder, "run.json", _LARGEST))
    lines = [json.loads(line) for line in read_inside(folder, "metrics.jsonl", _LARGEST).splitlines()]
    steps = [line["step_ms"] for line in lines[_WARM_UP:] or lines]
    if not steps:
        raise ConfigError(f"--from {folder}: its metrics.jsonl has no step yet")
    config, ds_config = from_mapping(about["config"], f"--from {folder}"), about["deepspeed"]
    each = ds_config["train_micro_batch_size_per_gpu"] * ds_config["gradient_accumulation_steps"]
    return Measured(
        source=f"measured in {folder}",
        config=config,
        deepspeed=ds_config,
        ranks=ds_config["train_batch_size"] // each,
        device=about["device"],
        seconds=1e-3 * statistics.median(steps),
    )


def _of_record(path: Path) -> Measured:
    lines = [json.loads(line) for line in read_bounded(path, _LARGEST).splitlines() if line.strip()]
    fingerprint: dict[str, Any] = next((line["fingerprint"] for line in lines if "fingerprint" in line), {})
    rows = [line["measurement"] for line in lines if "measurement" in line]
    steps = [row for row in rows if (row["bench"], row["quantity"]) == ("step", "step time")]
    if not steps:
        raise ConfigError(f"--from {path}: no step time; expected a record of `fastdiff bench step`")
    best = min(steps, key=lambda row: row["value"] / row["facts"]["batch"])
    same = [row for row in rows if (row["case"], row["provider"]) == (best["case"], best["provider"])]
    facts: Mapping[str, Any] = best["facts"]
    on_cpu = any(row["quantity"] == "peak resident" for row in same)
    return Measured(
        source=f"measured in {path}, {best['case']}",
        config=_config(facts),
        deepspeed={"zero_optimization": {"stage": _stage(str(facts["deepspeed"]))}},
        ranks=1,
        device="cpu" if on_cpu else fingerprint["device"],
        seconds=1e-3 * best["value"],
        passes=_passes(best, same),
    )


def _config(facts: Mapping[str, Any]) -> RunConfig:
    from fastdiff.config.presets import preset

    base = preset(facts["preset"])
    names = ("precision", "compile", "kernels", "recompute")
    given = {name: facts[name] for name in names if facts.get(name) is not None}
    return replace(
        base,
        samples=facts["batch"],
        batch=replace(base.batch, samples=facts["batch"], micro=facts.get("micro")),
        optim=with_optimizer(base, facts.get("optimizer") or base.optim.name, "the record").optim,
        performance=replace(base.performance, **given),
    )


def _stage(name: str) -> int:
    """Return the ZeRO stage of a file of ``deepspeed_configs``."""
    return 0 if name == "ddp" else int(name.removeprefix("zero")[0])


def _passes(best: Mapping[str, Any], same: list[dict[str, Any]]) -> float | None:
    """Return the seconds of the passes, from phases that a slower process with marks measured."""
    marked = {row["quantity"]: row for row in same if row["quantity"] in ("phase forward", "phase backward")}
    if len(marked) < 2:
        return None
    return float(sum(1e-3 * row["value"] * best["value"] / row["facts"]["marked_step_ms"] for row in marked.values()))
