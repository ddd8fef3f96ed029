"""Comparison of the reports of all nodes: the problems by node, and a table."""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastdiff.cluster.preflight.bandwidth import Exchange
from fastdiff.cluster.preflight.clock import Offset
from fastdiff.errors import ConfigError, DataError, FastdiffError, StorageError
from fastdiff.tables import table
from fastdiff.terminal import columns

CLOCK_S = 2.0
"""Allowed distance of a clock from the median; modification times and logs stay comparable."""
_ROWS = 16
_ERRORS: tuple[type[FastdiffError], ...] = (ConfigError, DataError, StorageError)


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of one node."""

    node: int
    name: str
    exit_code: int
    """Exit code of its error class."""
    text: str

    def __str__(self) -> str:
        return f"node {self.node} ({self.name}): {self.text}"


@dataclass(slots=True)
class NodeReport:
    """The findings of one node."""

    node: int
    name: str
    versions: dict[str, str]
    clock: Offset | None = None
    """None: not measured."""
    exchanges: list[Exchange] = field(default_factory=list)
    data: dict[str, str] = field(default_factory=dict)
    """Digests of the data sets of the run, by path."""
    problems: list[Problem] = field(default_factory=list)
    """Problems that need no comparison with other nodes."""
    wrote: bool = False
    """Whether it could write into the output folder and saw node 0's files there."""

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> NodeReport:
        """Build a report from its JSON content."""
        return cls(
            **dict(content)
            | {
                "clock": content["clock"] and Offset(**content["clock"]),
                "exchanges": [Exchange(**exchange) for exchange in content["exchanges"]],
                "problems": [Problem(**problem) for problem in content["problems"]],
            }
        )

    def note(self, error: FastdiffError) -> None:
        """Add an error as a problem of this node."""
        self.problems.append(self.problem(str(error), type(error)))

    def problem(self, text: str, kind: type[FastdiffError] = ConfigError) -> Problem:
        """Return a problem of this node."""
        return Problem(self.node, self.name, kind.exit_code, text)


def compare(reports: Sequence[NodeReport]) -> list[Problem]:
    """Return the problems of all nodes: their own findings, and differences between nodes."""
    found = [*_versions(reports), *(problem for report in reports for problem in report.problems)]
    return [*found, *_data(reports), *_clocks(reports), *_links(reports)]


def as_error(problems: Sequence[Problem], nodes: int) -> FastdiffError:
    """Return all problems as one error of the class of the first problem."""
    kind = next((kind for kind in _ERRORS if kind.exit_code == problems[0].exit_code), ConfigError)
    bad = len({problem.node for problem in problems})
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    heading = f"pre-flight: {count} on {bad} of {nodes} nodes"
    return kind("\n  ".join([heading, *map(str, problems)]), everywhere=True)


def table_of_nodes(reports: Sequence[NodeReport], problems: Sequence[Problem]) -> str:
    """Return a table with one line per node; with many nodes, those with problems and the slowest."""
    bad = Counter(problem.node for problem in problems)
    best = {report.node: min(_best(report).values(), default=None) for report in reports}
    shown = sorted(reports, key=lambda report: (-bad[report.node], best[report.node] or 0.0))[:_ROWS]
    rows = [("node", "name", "clock", "best exchange", "")]
    for report in sorted(shown, key=lambda report: report.node):
        clock = f"{report.clock.seconds:+.3f} s" if report.clock else "-"
        slowest = best[report.node]
        speed = "-" if slowest is None else f"{slowest / 1e9:.2f} GB/s"
        rows.append(
            (str(report.node), report.name, clock, speed, f"problems: {bad[report.node]}" if bad[report.node] else "ok")
        )
    lines = [table(rows, range(len(rows[0])), columns(sys.stdout))]
    left_out = len(reports) - len(shown)
    return "\n".join(lines + [f"and {left_out} nodes without problems, no slower"] * (left_out > 0))


def _versions(reports: Sequence[NodeReport]) -> Iterator[Problem]:
    for key in dict.fromkeys(key for report in reports for key in report.versions):
        yield from _minority(
            {report.node: report.versions.get(key, "unknown") for report in reports},
            reports,
            lambda here, there, key=key: f"{key} is {here}, {there}; install the same on all nodes",  # type: ignore[misc]
            ConfigError,
        )


def _data(reports: Sequence[NodeReport]) -> Iterator[Problem]:
    for path in sorted({path for report in reports for path in report.data}):
        yield from _minority(
            {report.node: report.data[path][:12] for report in reports if path in report.data},
            reports,
            lambda here, there, path=path: (  # type: ignore[misc]
                f"{path} is a different data set (digest {here}, {there}); give all nodes the same files"
            ),
            DataError,
        )


def _minority(values: Mapping[int, str], reports: Sequence[NodeReport], say: Any, kind: Any) -> Iterator[Problem]:
    """Yield a problem for each node that differs from the majority, or from node 0 if there is no majority."""
    counts = Counter(values.values()).most_common()
    if len(counts) < 2:
        return
    usual, most = counts[0]
    if counts[1][1] == most:
        usual = next(iter(values.values()))
    first, *others = [node for node, value in values.items() if value == usual]
    there = f"{usual} on node {first}" + (f" and {len(others)} others" if others else "")
    for report in reports:
        if values.get(report.node, usual) != usual:
            yield report.problem(say(values[report.node], there), kind)


def _clocks(reports: Sequence[NodeReport]) -> Iterator[Problem]:
    measured = {report.node: report.clock for report in reports if report.clock}
    if not measured:
        return
    median = statistics.median(offset.seconds for offset in measured.values())
    for report in reports:
        if (offset := report.clock) and abs(offset.seconds - median) - offset.error_s > CLOCK_S:
            yield report.problem(
                f"its clock is {offset.seconds - median:+.1f} s from the median of all nodes (allowed: {CLOCK_S:.0f} s)"
                "; synchronise it (chrony or ntp)"
            )


def _best(report: NodeReport) -> dict[int, float]:
    """Return the bytes per second of the best exchange per device; 0 if all exchanges failed."""
    best: dict[int, float] = {}
    for exchange in report.exchanges:
        best[exchange.device] = max(best.get(exchange.device, 0.0), exchange.bytes_per_s)
    return best


def _links(reports: Sequence[NodeReport]) -> Iterator[Problem]:
    """Yield a problem for each device that is slow with every partner.

    A slow device slows one exchange of every other node, but not that node's best exchange.
    """
    best = {(report.node, device): speed for report in reports for device, speed in _best(report).items()}
    median = statistics.median(best.values()) if best else 0.0
    for report in reports:
        for device, speed in _best(report).items():
            failed = next((e.failure for e in report.exchanges if e.device == device and e.failure), "")
            what = f"device {device}: " if len(_best(report)) > 1 else ""
            if not speed:
                yield report.problem(f"{what}all exchanges with other nodes failed ({failed})")
            elif speed < median / 2:
                yield report.problem(
                    f"{what}exchanges {speed / 1e9:.3f} GB/s with its best partner, against a median of "
                    f"{median / 1e9:.3f} GB/s; exclude the node or check its network"
                )
