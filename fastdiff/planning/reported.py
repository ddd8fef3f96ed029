"""What the authors of a recipe report of its cost, beside the plan of its preset."""

from collections.abc import Iterator, Sequence
from typing import Any

from fastdiff.config.presets import PRESETS
from fastdiff.config.presets.reported import REPORTED, Reported
from fastdiff.config.run import RunConfig
from fastdiff.models.cost.flops import run_flops
from fastdiff.planning import gpus
from fastdiff.planning.options import Planned


def reports(config: RunConfig, preset: str | None) -> tuple[Reported, ...] | None:
    """Return what is reported of a run; None: nothing is published of it, or its network is another one."""
    if preset is None or preset not in REPORTED:
        return None
    return REPORTED[preset] if PRESETS[preset]().model == config.model else None


def mfu(config: RunConfig, report: Reported) -> float | None:
    """Return the model FLOPs utilisation that the hours of a report make with the network of ``config``."""
    gpu = gpus.parse(report.gpu, gpus.known()).kind
    return gpu.mfu(run_flops(config) * report.samples / (3600 * report.gpu_hours))


def figures(config: RunConfig, preset: str | None) -> list[dict[str, Any]]:
    """Return the reports as plain numbers."""
    return [
        {
            "gpu": report.gpu,
            "gpu_hours": report.gpu_hours,
            "samples": report.samples,
            "mfu": mfu(config, report),
            "source": report.source,
        }
        for report in reports(config, preset) or ()
    ]


def lines(config: RunConfig, preset: str | None, best: Sequence[Planned]) -> Iterator[str]:
    """Yield the reports in words, and the hours of the fastest option for as many samples."""
    found = reports(config, preset)
    if found is None:
        return
    if not found:
        yield "reported: no hours of its authors are known here"
    for report in found:
        yield f"reported: {_cost(report.gpu_hours, report.gpu, report.samples, mfu(config, report))}"
        yield f"  {report.source}"
    for first in best[:1]:
        kind = first.option.gpus.kind.name
        for samples in dict.fromkeys(report.samples for report in found) or (config.samples,):
            yield f"planned: {_cost(first.gpu_hours(samples), kind, samples, first.mfu)}"


def _cost(hours: float, gpu: str, samples: int, share: float | None) -> str:
    counted = "" if share is None else f", MFU {share:.1%}"
    return f"{hours:,.3g} {gpu}-hours for {samples:,} samples{counted}"
