"""What the report opens with: the devices, the fastest steps, and the comparisons by bench."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fastdiff_bench.page import bench_charts
from fastdiff_bench.page.row_charts import RowChart
from fastdiff_bench.page.tables import Table, tables
from fastdiff_bench.records import comparisons, record_warnings
from fastdiff_bench.records.comparisons import Comparison
from fastdiff_bench.records.fingerprint import Fingerprint
from fastdiff_bench.records.record import Measurement, Record, by_provider

_OF_A_STEP = ("throughput", "step time", "mfu", "of matmul", "peak allocated", "peak resident")
_BATCH = re.compile(r", batch \d+\b")


def device(fingerprint: Fingerprint) -> str:
    """Return the GPU, or the processor where there is none."""
    if fingerprint.device == "cpu":
        return f"{fingerprint.cpu}, {fingerprint.cores} cores, no GPU"
    return fingerprint.device


def devices(records: Sequence[Record], titles: Mapping[str, str]) -> Iterator[tuple[str, str, str, str]]:
    """Yield each device, GPUs first: name, verdict on other programs, what was measured, date of the newest record."""
    for name, own in _by_device(records).items():
        names = dict.fromkeys(m.bench for one in own for m in one.measurements)
        benches = sorted(names, key=[*titles, *names].index)
        compared = [found for one in own for found in comparisons.of_record(one)]
        yield (
            name,
            comparisons.counts(compared) if compared else "none yet",
            "; ".join(titles.get(bench, bench) for bench in benches),
            max(one.fingerprint.date for one in own)[:10],
        )


def fastest_steps(records: Sequence[Record]) -> list[Table]:
    """Return fastdiff's training step with the highest throughput, of each network on each device, and warnings."""
    best: dict[tuple[str, str], dict[str, Measurement]] = {}
    for name, own in _by_device(records).items():
        for case, of_one in _own_steps(own):
            names = name, _BATCH.sub("", case)
            if names not in best or best[names]["throughput"].value < of_one["throughput"].value:
                best[names] = of_one
    return tables([replace(m, case=name) for (name, _), of_one in best.items() for m in of_one.values()])


def _own_steps(records: Sequence[Record]) -> Iterator[tuple[str, dict[str, Measurement]]]:
    """Yield fastdiff's measured training steps by their cases; their providers say case, program and warning."""
    for one in records:
        reason = record_warnings.busy(one.fingerprint)
        for (case, provider), of_one in by_provider(one.measurements).items():
            if comparisons.is_ours(provider) and {"throughput", "step time"} <= of_one.keys():
                told = f"{case}; {provider}{f'; doubtful: {reason}' if reason else ''}"
                yield (
                    case,
                    {name: replace(of_one[name], bench="step", provider=told) for name in _OF_A_STEP if name in of_one},
                )


def by_bench(found: Sequence[Comparison], titles: Mapping[str, str]) -> Iterator[tuple[RowChart, str]]:
    """Yield the comparisons of each bench, in the order of the titles, as a chart and in words."""
    for bench, chart in bench_charts.of_comparisons(found, titles):
        own = [one for one in found if one.bench == bench]
        yield chart, f"{comparisons.counts(own)}; {comparisons.span(own)}"


def _by_device(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the records with measurements by device, GPUs first; smoke runs measure nothing."""
    found: dict[str, list[Record]] = {}
    for one in sorted(records, key=lambda one: (one.fingerprint.device == "cpu", device(one.fingerprint))):
        if one.measurements and not record_warnings.is_smoke(one):
            found.setdefault(device(one.fingerprint), []).append(one)
    return found
