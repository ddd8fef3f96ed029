"""fastdiff's step against baselines: the same model, batch and data, measured interleaved.

Each baseline runs twice: as published, and with its best flags. The modules ``trainers/plain.py``, ``trainers/dit.py``
and ``trainers/text_to_image.py`` describe them; the record and the lines below the table list the flags. All have their
data in memory except diffusers as published, which decodes and encodes images in every step, as its script does.
"""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.config.optimizers.adamw import AdamWConfig
from fastdiff.config.sections.objective import ObjectiveConfig
from fastdiff.config.sections.timesteps import TimestepConfig
from fastdiff_bench import BenchError
from fastdiff_bench.measure import interleaved, stepping, synthetic
from fastdiff_bench.measure.timing import Timing
from fastdiff_bench.measure.workload import Workload
from fastdiff_bench.records import record, record_warnings
from fastdiff_bench.records.record import Fact, Measurement
from fastdiff_bench.records.tables import progress, table
from fastdiff_bench.trainers import dit, images, plain, text_to_image
from fastdiff_bench.trainers.encoders import FACTOR
from fastdiff_bench.trainers.plain_torch import FLAGS, untrained

_RUNS = {"plain": plain.run, "dit": dit.run, "diffusers": text_to_image.run}
BASELINES = tuple(_RUNS)
BEST = "best flags"
_BENCH = "peer"
_OPTIMIZER = AdamWConfig().name
"""The baselines' optimizer."""
_BATCHES = 4
"""Batches in the data set: more would cost time to write and change no step."""
_SHARED = ("preset", "batch", "recompute")
"""Facts that all trainers share; the rest are fastdiff's own."""
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class _Entry:
    """A trainer and the names of its lines in the record."""

    program: interleaved.Program
    case: str
    is_ours: bool
    facts: Mapping[str, Fact]


def run(workload: Workload, peers: Sequence[str], effort: interleaved.Effort, device: str, log: record.Log) -> int:
    """Measure fastdiff and the baselines interleaved, write the record and print a table.

    Args:
        workload: workload of all trainers; with ``plain`` fastdiff also runs under ZeRO-3.
        peers: baselines of ``BASELINES``.
        effort: number of steps.
        device: ``cuda`` or ``cpu``.
        log: gets step times, throughput, memory and speed-ups.

    Returns:
        0, or 1 if a trainer failed.

    Raises:
        BenchError: a baseline cannot train this workload.
    """
    _check(workload, peers)
    if workload.optimizer is None and workload.config(Path(), Path()).optim.name != _OPTIMIZER:
        workload = replace(workload, optimizer=_OPTIMIZER)  # for a fair comparison
    folder = Path(tempfile.mkdtemp(prefix="fastdiff-bench-peers-"))
    try:
        entries = _entries(workload, peers, folder)
        programs, effort = [entry.program for entry in entries], stepping.warmed(effort, workload)
        results = interleaved.run_interleaved(programs, effort, device=device)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for entry in entries:
        _write(log, entry, results[entry.program.name], workload.samples)
    ratios = _speed_ups(log, entries, results)
    print(_summary(entries, results, ratios, workload.samples))
    return int(any(result.failure is not None for result in results.values()))


def _check(workload: Workload, peers: Sequence[str]) -> None:
    config = workload.config(Path(), Path())
    unknown = [name for name in peers if name not in BASELINES]
    if unknown or not peers or len(set(peers)) != len(peers):
        raise BenchError(f"--peer {' '.join(peers)}: expected some of {', '.join(BASELINES)}, each once")
    _check_objective(workload.preset, config.objective, config.timesteps, peers)
    model = config.model
    if "dit" in peers and not isinstance(model, DiTConfig):
        raise BenchError(f"--peer dit needs a DiT, and preset {workload.preset} has a UNet; try --preset dit-s-2-256")
    if "diffusers" in peers and (not isinstance(model, UNetConfig) or model.pooled_dim):
        raise BenchError(
            "--peer diffusers needs the UNet of Stable Diffusion 1.x and 2.x, and preset "
            f"{workload.preset} has another network; try --preset digits-t2i or sd2-512"
        )
    if config.batch.micro == "auto" or config.batch.accumulation(1) > 1:
        cause = f"--micro {workload.micro}" if workload.micro else f"preset {workload.preset} accumulates gradients"
        cure = "leave it out" if workload.micro else "give --batch"
        raise BenchError(f"{cause}: the baselines do not accumulate gradients; {cure}")
    if config.performance.precision == "fp16":
        raise BenchError("--precision fp16: the baselines compute in fp32 and bf16; use one of them")


def _check_objective(preset: str, objective: ObjectiveConfig, timesteps: TimestepConfig, peers: Sequence[str]) -> None:
    """Refuse an objective that a baseline does not support."""
    for name in peers:
        lacks = text_to_image.not_in_script if name == "diffusers" else untrained
        if flags := lacks(objective, timesteps):
            raise BenchError(
                f"--peer {name} does not support preset {preset}, which has {', '.join(flags)}; try "
                "--preset dit-xl-2-256, or digits-t2i for diffusers"
            )


def _entries(workload: Workload, peers: Sequence[str], folder: Path) -> list[_Entry]:
    """Write the data and return the trainers, fastdiff first."""
    config = workload.config(folder, folder)
    progress("writing data")
    count = _BATCHES * config.batch.samples
    shards = synthetic.write(folder / "shards", config.model, count)
    cached, online = (f"{workload.case}, {kind}" for kind in ("cached", "online"))
    # ZeRO-3 has no CUDA graph.
    workloads = [workload] + ([replace(workload, deepspeed="zero3", cuda_graph=None)] if "plain" in peers else [])
    entries = {
        each.provider: _Entry(
            interleaved.Program(each.provider, stepping.run_fastdiff, (each, shards)), cached, True, each.facts
        )
        for each in workloads
    }
    for name in peers:
        for best in (False, True):
            data, case = shards, cached
            facts: dict[str, Fact] = {fact: workload.facts[fact] for fact in _SHARED}
            facts |= {"optimizer": "adamw", "best flags": best}
            if name == "diffusers" and not best:
                data = images.write(folder / "images", count, FACTOR * config.model.size)
                case = online
            provider = f"{name}, {BEST}" if best else name
            program = interleaved.Program(provider, _RUNS[name], (workload, data, best))
            entries[provider] = _Entry(program, case, False, facts)
    return list(entries.values())


def _write(log: record.Log, entry: _Entry, result: interleaved.Result, batch: int) -> None:
    provider = entry.program.name
    if result.failure is not None or result.memory is None:
        log.write(record.Failure(bench=_BENCH, case=entry.case, provider=provider, reason=result.failure or "no end"))
        return
    row = partial(Measurement.of, _BENCH, entry.case, provider, facts={**entry.facts, **result.facts})
    phases = result.sessions[0].phases
    log.write(*stepping.figures(row, result, batch))
    log.write(*(row(f"phase {phase}", "ms", result.phase(phase), "lower", scale=1e3) for phase in phases))


def _speed_ups(
    log: record.Log, entries: Sequence[_Entry], results: Mapping[str, interleaved.Result]
) -> dict[tuple[str, str], str]:
    """Write the speed-up of each fastdiff configuration over each baseline; return them by name, formatted.

    Those of a smoke run stay in its record.
    """
    words = {}
    alive = [entry for entry in entries if results[entry.program.name].failure is None]
    for us in (entry for entry in alive if entry.is_ours):
        for peer in (entry for entry in alive if not entry.is_ours):
            ours, theirs = us.program.name, peer.program.name
            timing = interleaved.ratios(results[ours], results[theirs])
            name = f"{ours} over {theirs}"
            log.write(Measurement.of(_BENCH, peer.case, name, "speed-up", "1", timing, "higher", facts=us.facts))
            words[ours, theirs] = _words(timing, results[ours], results[theirs])
    return {} if log.fingerprint.smoke else words


def _words(ratio: Timing, *sides: interleaved.Result) -> str:
    """Format a speed-up, marked if its own rounds or the steps of a side are too unsteady for one."""
    timings = (ratio, *(side.timing for side in sides))
    mark = " unsteady" if any(record_warnings.too_wide(timing.p20, timing.p80) for timing in timings) else ""
    return f"{ratio.median:.2f} ({ratio.p20:.2f}-{ratio.p80:.2f}){mark}"


def _summary(
    entries: Sequence[_Entry],
    results: Mapping[str, interleaved.Result],
    ratios: Mapping[tuple[str, str], str],
    batch: int,
) -> str:
    ours = [entry.program.name for entry in entries if entry.is_ours] if ratios else []
    rows = [
        [
            "",
            "ms per step",
            "p20-p80",
            "processor ms",
            "samples/s",
            "peak GiB",
            *(f"{name} is x times as fast" for name in ours),
        ]
    ]
    for entry in entries:
        name, result = entry.program.name, results[entry.program.name]
        if result.failure is not None or result.memory is None:
            rows.append([name, "failed", "", "", "", "", *("" for _ in ours)])
            continue
        low, middle, high = (value * 1e3 for value in (result.timing.p20, result.timing.median, result.timing.p80))
        rows.append(
            [
                name, f"{middle:.1f}", f"{low:.1f}-{high:.1f}", f"{1e3 * result.processor_time.median:.1f}",
                f"{batch / middle * 1e3:.2f}",
                f"{result.memory.peak / _GIB:.2f}", *(ratios.get((who, name), "") for who in ours),
            ]
        )  # fmt: skip
    lines = [f"{entries[0].case}", table(rows, "<" + ">" * (len(rows[0]) - 1))]
    for entry in entries:
        found = results[entry.program.name].facts
        flags = ", ".join(f"{flag} {found[flag]}" for flag in FLAGS if flag in found)
        lines += [f"{entry.program.name}: {flags}"] if flags else []
    peaks = [result.memory.peak for result in results.values() if result.memory is not None]
    lines.append(f"memory of all processes together: {sum(peaks) / _GIB:.2f} GiB, the sum of the peaks")
    lines += [f"{name}: {result.failure}" for name, result in results.items() if result.failure is not None]
    return "\n".join(lines)
