"""Samples per second after changes that no GPU has measured, from the counted kernels: each adds to those before it.

A change is arithmetic on the rows of ``budget.kernels``.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fastdiff.planning.kernels import Kernels
from fastdiff.planning.rates import MIDDLE, SUSTAINED
from fastdiff.planning.step_time import Factors, step_time
from fastdiff_bench.emission import budget
from fastdiff_bench.emission.blocks import Emission
from fastdiff_bench.records.record import Measurement
from fastdiff_bench.records.tables import table

_GRAPH_GAP = 0.8 / 1.8
"""Gap between kernels in a CUDA graph over the one without: 0.8 us is assumed."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change."""

    name: str
    gaps: float = 1.0
    """Factor of the gaps between kernels."""
    attention: float = 0.0
    """Useful operations per second of attention, whose backward pass counts twice the forward; 0: as it is."""


CHANGES = (
    Change("gaps of a CUDA graph", gaps=_GRAPH_GAP),
    Change("attention at 285 TFLOP/s", attention=2.85e14),
)


def applies(network: Emission) -> bool:
    """Whether the changes are for this network, counted: one kind of block, of matrix products and short attention."""
    kinds = {budget.kind_of(product) for _, product in budget.products(network.blocks)}
    return network.instructions and len(network.blocks) == 1 and kinds == {"matmul", "short_attention"}


def rates(network: Emission, batch: int) -> list[tuple[str, float]]:
    """Return the middle rate of the flat engine, in samples per second, as it is and after each change."""
    work = budget.work_of(network, batch, "flat")
    found = []
    for change in (Change("as counted"), *CHANGES):
        work = replace(work, kernels=tuple(_changed(change, row) for row in work.kernels))
        seconds = step_time(work, budget.H200, Factors(passes=SUSTAINED)).whole.middle
        found.append((change.name, batch / seconds))
    return found


def _changed(change: Change, row: Kernels) -> Kernels:
    if row.kind == "short_attention" and change.attention:
        useful = row.operations * 3 / 3.5  # forward 1, backward 2 instead of the 2.5 that its kernels compute
        rate = MIDDLE.short_attention * budget.H200.kind.rates["bf16"]
        return replace(row, operations=useful / change.attention * rate)
    return replace(row, launches=row.launches * change.gaps)


def tabulate(network: Emission, batch: int) -> str:
    """Format the predicted rates for the terminal."""
    cells = [("not measured, each with those before", "samples/s, flat, mid")]
    return table([*cells, *((name, f"{rate:.0f}") for name, rate in rates(network, batch))], "<>")


def rows(preset: str, network: Emission, batch: int) -> Iterator[Measurement]:
    """Yield the prediction as lines of a record."""
    case = f"{preset}, batch {batch}, predicted, changes to come"
    for name, rate in rates(network, batch):
        yield Measurement.of("emit", case, name, "rate at mid", "samples/s", round(rate, 1), "higher")
