"""Results of the readers, as measurements and as a table."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from fastdiff_bench.measure import interleaved
from fastdiff_bench.measure.session import Steps
from fastdiff_bench.measure.timing import Timing
from fastdiff_bench.readers.samples import Samples
from fastdiff_bench.records import record_warnings
from fastdiff_bench.records.number_format import number
from fastdiff_bench.records.record import Fact, Failure, Log, Measurement
from fastdiff_bench.records.tables import table

READER = "fastdiff reader"
"""Baseline of the comparison."""

Heat = Literal["warm", "cold"]
"""State of the page cache before a session: warm has all files, cold has none."""

_RESIDENT = "high-water mark of the process, and what its workers alone hold in the end"
"""Definition of peak resident memory: a sum over processes; their peaks differ in time and share pages."""


@dataclass(frozen=True, slots=True)
class Case:
    """A case: the same samples for all readers, with a warm or a cold cache."""

    samples: Samples
    workers: int
    """Worker processes of the readers that use them."""
    heat: Heat
    device: str

    @property
    def name(self) -> str:
        """Name of the case in records."""
        return f"{self.samples.kilobytes} KB samples, batch {self.samples.batch}, {self.heat}"

    def report(self, results: Mapping[str, interleaved.Result], cached: float, log: Log) -> None:
        """Write the measurements, and print them as a table."""
        heading = ["reader", "samples/s", "[p20,", "p80]", "MB/s", "CPU us/sample", "peak GiB", f"{READER} over it"]
        rows = [heading]
        settled = {name: self._settled(result) for name, result in results.items() if result.failure is None}
        for name, result in results.items():
            if result.failure is not None:
                log.write(Failure(bench="data", case=self.name, provider=name, reason=result.failure))
                rows.append([name, "", "", "", "", "", "", result.failure])
                continue
            found = list(self._measurements(name, settled, cached))
            log.write(*found)
            first, last = found[0].interval
            shown = [one.value for one in found[1:] if not (log.fingerprint.smoke and record_warnings.is_ratio(one))]
            cells = [number(value) for value in (found[0].value, first, last, *shown)]
            rows.append([name, *cells, *[""] * (len(heading) - 1 - len(cells))])
        print(f"\n{self.name}\n{table(rows, '<>>>>>>>')}\npeak GiB: {_RESIDENT}")

    def _settled(self, result: interleaved.Result) -> interleaved.Result:
        """Reduce each session to its mean step, because processes deliver in bursts.

        The first steps of a session are dropped if their batches were read ahead during other readers' sessions.
        """
        sessions = []
        for session in result.sessions:
            ahead = min(int(result.facts["read ahead"] or 0), len(session.seconds) // 2)
            sessions.append(
                Steps([statistics.fmean(session.seconds[ahead:])], {}, session.cpu_seconds / len(session.seconds))
            )
        return interleaved.Result(sessions, result.facts, result.memory)

    def _measurements(
        self, name: str, settled: Mapping[str, interleaved.Result], cached: float
    ) -> Iterator[Measurement]:
        result, batch, size = settled[name], self.samples.batch, self.samples.sample_bytes
        facts = self._facts(checked=name.startswith("fastdiff"))
        facts |= {"read ahead": result.facts["read ahead"], "cached": cached}

        row = partial(Measurement.of, "data", self.name, facts=facts)
        rates = Timing.of([batch / seconds for seconds in result.seconds])
        yield row(name, "throughput", "samples/s", rates, "higher")
        yield row(name, "bandwidth", "MB/s", rates, "higher", scale=size * 1e-6)
        cpu = Timing.of([session.cpu_seconds / batch for session in result.sessions])
        yield row(name, "cpu time", "us", cpu, "lower", scale=1e6)
        assert result.memory is not None
        resident = result.memory.resident + int(result.facts["workers' memory"] or 0)
        resident_facts = facts | {"resident": _RESIDENT}
        yield row(name, "peak resident", "GiB", resident, "lower", scale=2**-30, facts=resident_facts)
        if name != READER and READER in settled:
            ratios = interleaved.ratios(settled[READER], result)
            yield row(f"{READER} over {name}", "speed-up", "1", ratios, "higher")

    def _facts(self, *, checked: bool) -> dict[str, Fact]:
        samples = self.samples
        return {
            "samples": samples.count, "batch": samples.batch, "sample_bytes": samples.sample_bytes,
            "mixed": samples.mixed, "workers": self.workers, "heat": self.heat, "device": self.device,
            "crc32 checked": checked,
        }  # fmt: skip
