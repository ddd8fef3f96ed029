"""Images per second that changes to come would give, from the counted kernels of today: each adds to those before it.

A change is arithmetic on the rows of ``budget.kernels``. None is measured.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fastdiff.planning import gpus
from fastdiff.planning.kernels import Kernels
from fastdiff.planning.rates import MIDDLE, SUSTAINED
from fastdiff.planning.step_time import Factors, step_time
from fastdiff_bench.emission import budget
from fastdiff_bench.emission.blocks import Emission, Product
from fastdiff_bench.records.record import Measurement
from fastdiff_bench.records.tables import table

_GRAPH_GAP = 0.8 / 1.8
"""Gap between kernels in a CUDA graph over the one without: 0.8 us is assumed."""
_FP8_RATE = 1.42e15
"""Operations per second of large products in FP8: assumed, of 1.98e15 on the data sheet."""
_FP8_FILLING = 3
"""Tiles of 128 along K that a product in FP8 takes to begin and to end. Assumed."""
_CASTS = "casts to FP8"
"""Row of what is written beside the operands in bf16."""
_TOKENS = 64
"""Rows per sample from which a product is one of tokens, which FP8 multiplies."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change to come."""

    name: str
    without: str = ""
    """Pattern of the kernels that it makes superfluous; nothing: none."""
    gaps: float = 1.0
    """Factor of the gaps between kernels."""
    attention: float = 0.0
    """Useful operations per second of attention, whose backward pass counts twice the forward; 0: as it is."""
    fp8: str = ""
    """``inputs``: the products with weights are in FP8, those of weight gradients in bf16; ``all``: those, too."""


CHANGES = (
    Change("gaps of a CUDA graph", gaps=_GRAPH_GAP),
    Change("gradients of q, k, v written packed", without="_join_kernel$"),
    Change("attention at 285 TFLOP/s", attention=2.85e14),
    Change("products in FP8, weight gradients in bf16", fp8="inputs"),
    Change("weight gradients in FP8, too", without=f"^{_CASTS}$", fp8="all"),
)


def applies(network: Emission) -> bool:
    """Whether the changes are for this network, counted: one kind of block, of products in bf16 and short attention."""
    kinds = {budget.kind_of(product) for _, product in budget.products(network.blocks)}
    in_fp8 = any(product.op == budget.SCALED for _, product in budget.products(network.blocks))
    return network.instructions and len(network.blocks) == 1 and kinds == {"matmul", "short_attention"} and not in_fp8


def rates(network: Emission, batch: int) -> list[tuple[str, float]]:
    """Return the middle rate of the flat engine, in samples per second, as it is and after each change."""
    work, h200 = budget.work_of(network, batch, "flat"), gpus.parse("H200", gpus.known())
    found, rows = [], work.kernels
    for change in (Change("as counted"), *CHANGES):
        rows = tuple(_changed(change, rows, network))
        seconds = step_time(replace(work, kernels=rows), h200, Factors(passes=SUSTAINED)).whole.middle
        found.append((change.name, batch / seconds))
    return found


def _changed(change: Change, rows: Sequence[Kernels], network: Emission) -> Iterator[Kernels]:
    for row in rows:
        if change.without and re.search(change.without, row.name):
            continue
        if row.launches:
            row = replace(row, launches=row.launches * change.gaps)
        if row.kind == "short_attention" and change.attention:
            useful = row.operations * 3 / 3.5  # forward 1, backward 2 instead of the 2.5 that its kernels compute
            row = _taking(row, useful / change.attention)
        if row.name == "matrix products" and change.fp8:
            row = _taking(row, _fp8_seconds(change, network))
        yield row
    if change.fp8 == "inputs":
        moved = sum(calls * product.shapes[-2][0] * product.shapes[-2][1] for calls, product in _large(network)
                    if not _of_weights(product))  # fmt: skip
        yield Kernels(name=_CASTS, kind="counted", bytes=moved / network.batch)
    if change.fp8 == "all":  # every kernel writes FP8 and its transpose instead of bf16, but attention
        moved = sum(4 * len(block.names) * block.elements for block in network.blocks)
        yield Kernels(name=_CASTS, kind="counted", bytes=moved / network.batch)


def _taking(row: Kernels, seconds: float) -> Kernels:
    """Return a row of products that takes these seconds per sample with the middle shares."""
    rate = gpus.parse("H200", gpus.known()).kind.rates["bf16"]
    return replace(row, operations=seconds * getattr(MIDDLE, row.kind) * rate)


def _large(network: Emission) -> Iterator[tuple[int, Product]]:
    """Yield the products of tokens, and how often a step calls each."""
    for calls, product in budget.products(network.blocks):
        if budget.kind_of(product) == "matmul" and max(product.shapes[-2]) >= _TOKENS * network.batch:
            yield calls, product


def _of_weights(product: Product) -> bool:
    """Whether it sums over all tokens."""
    return product.shapes[-2][1] > product.shapes[-2][0]


def _fp8_seconds(change: Change, network: Emission) -> float:
    """Return the seconds per sample of all matrix products."""
    bf16 = MIDDLE.matmul * gpus.parse("H200", gpus.known()).kind.rates["bf16"]
    large = {id(product) for _, product in _large(network)}
    total = 0.0
    for calls, product in budget.products(network.blocks):
        if budget.kind_of(product) != "matmul":
            continue
        tiles = product.shapes[-2][1] / 128
        fp8 = id(product) in large and (change.fp8 == "all" or not _of_weights(product))
        total += calls * budget.operations(product) / (_FP8_RATE * tiles / (tiles + _FP8_FILLING) if fp8 else bf16)
    return total / network.batch


def tabulate(network: Emission, batch: int) -> str:
    """Format the predicted rates for the terminal."""
    cells = [("changes to come, each with those before", "samples/s, flat, mid")]
    return table([*cells, *((name, f"{rate:.0f}") for name, rate in rates(network, batch))], "<>")


def rows(preset: str, network: Emission, batch: int) -> Iterator[Measurement]:
    """Yield the prediction as lines of a record."""
    case = f"{preset}, batch {batch}, predicted, changes to come"
    for name, rate in rates(network, batch):
        yield Measurement.of("emit", case, name, "rate at mid", "samples/s", round(rate, 1), "higher")
