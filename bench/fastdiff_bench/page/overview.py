"""What the report opens with: the devices, the fastest steps, and the comparisons by bench."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fastdiff_bench.page import bench_charts
from fastdiff_bench.page.row_charts import RowChart
from fastdiff_bench.page.tables import Table, tables
from fastdiff_bench.records import doubts, races
from fastdiff_bench.records.fingerprint import Fingerprint
from fastdiff_bench.records.races import Race
from fastdiff_bench.records.record import Measurement, Record, by_provider

_OF_A_STEP = ("throughput", "step time", "mfu", "of matmul", "peak allocated", "peak resident")
_BATCH = re.compile(r", batch \d+\b")


@dataclass(frozen=True, slots=True)
class Device:
    """A device that records were measured on."""

    name: str
    benches: str
    """What was measured on it."""
    verdict: str
    """Its comparisons with other programs."""
    newest: str
    """Date of its newest record."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The races of one bench."""

    words: str
    span: str
    chart: RowChart


def device(fingerprint: Fingerprint) -> str:
    """Return the GPU, or the processor where there is none."""
    if fingerprint.device == "cpu":
        return f"{fingerprint.cpu}, {fingerprint.cores} cores, no GPU"
    return fingerprint.device


def devices(records: Sequence[Record], titles: Mapping[str, str]) -> Iterator[Device]:
    """Yield the devices of all measurements, GPUs first.

    Args:
        records: to look through.
        titles: of the benches, in the order of the page.
    """
    for name, own in _by_device(records).items():
        names = dict.fromkeys(m.bench for one in own for m in one.measurements)
        benches = sorted(names, key=[*titles, *names].index)
        compared = [race for one in own for race in races.races(one)]
        yield Device(
            name,
            "; ".join(titles.get(bench, bench) for bench in benches),
            races.counts(compared) if compared else "none yet",
            max(one.fingerprint.date for one in own)[:10],
        )


def fastest_steps(records: Sequence[Record]) -> list[Table]:
    """Return fastdiff's training step with the highest throughput, of each network on each device, with its doubts."""
    best: dict[tuple[str, str], dict[str, Measurement]] = {}
    for name, own in _by_device(records).items():
        for case, of_one in _own_steps(own):
            names = name, _BATCH.sub("", case)
            if names not in best or best[names]["throughput"].value < of_one["throughput"].value:
                best[names] = of_one
    return tables([replace(m, case=name) for (name, _), of_one in best.items() for m in of_one.values()])


def _own_steps(records: Sequence[Record]) -> Iterator[tuple[str, dict[str, Measurement]]]:
    """Yield fastdiff's measured training steps by their cases; their providers say case, program and doubt."""
    for one in records:
        reason = doubts.busy(one.fingerprint)
        for (case, provider), of_one in by_provider(one.measurements).items():
            if races.is_ours(provider) and {"throughput", "step time"} <= of_one.keys():
                told = f"{case}; {provider}{f'; doubtful: {reason}' if reason else ''}"
                yield (
                    case,
                    {name: replace(of_one[name], bench="step", provider=told) for name in _OF_A_STEP if name in of_one},
                )


def comparisons(found: Sequence[Race], titles: Mapping[str, str]) -> Iterator[Comparison]:
    """Yield the races by bench, in the order of the titles."""
    for bench, chart in bench_charts.of_races(found, titles):
        own = [race for race in found if race.bench == bench]
        yield Comparison(races.counts(own), races.span(own), chart)


def _by_device(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the records with measurements by device, GPUs first; smoke runs measure nothing."""
    found: dict[str, list[Record]] = {}
    for one in sorted(records, key=lambda one: (one.fingerprint.device == "cpu", device(one.fingerprint))):
        if one.measurements and not doubts.is_smoke(one):
            found.setdefault(device(one.fingerprint), []).append(one)
    return found
