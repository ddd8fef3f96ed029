"""Images per second of one H200 that ``fastdiff.planning`` predicts from the counts of the compiled blocks.

The blocks give the rows of kernels that ``fastdiff plan`` estimates from an eager pass; everything else is its model.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fastdiff.config.optimizers.registry import optimizer_family
from fastdiff.models.cost.traced import SHORT
from fastdiff.planning import gpus
from fastdiff.planning.kernels import Kernels, Kind
from fastdiff.planning.options import OF_STAGE
from fastdiff.planning.rates import LEVELS, SUSTAINED
from fastdiff.planning.scaling.zero import Zero, width_of
from fastdiff.planning.step_time import Factors, Work, step_time, update_seconds
from fastdiff_bench import BenchError
from fastdiff_bench.emission.blocks import Block, Emission, Product
from fastdiff_bench.instructions.walk import WARP
from fastdiff_bench.records.record import Measurement
from fastdiff_bench.records.tables import table
from fastdiff_bench.tracing.classes import CLASSES, IDLE, Class, of_kernel

ENGINES = {"zero1": (1, "adamw"), "flat": (0, "adamw"), "flat, 8-bit moments": (0, "adamw8bit")}
"""ZeRO stage and optimizer of each predicted step."""
SCALED = "_scaled_mm"
"""Product in FP8; its first arguments are the factors and their scales."""
H200 = gpus.parse("H200", gpus.known())
_FP8_FILLING = 3
"""Tiles of 128 along the summed axis that a product in FP8 takes to begin and to end: assumed. Beyond them it reaches
the share of its peak that was measured in bf16, where that share contains them."""
_ROUNDING = 1e-6
"""Share by which sums of counts may differ."""


def operations(product: Product, attention_backward: float = 2.5) -> float:
    """Return the operations of a product; a backward pass has twice those of the forward.

    Args:
        product: matrix product, convolution or attention.
        attention_backward: the same of attention: 2.5 as its kernels compute, since they repeat the scores; 2 as
            ``training_flops`` counts.
    """
    if kind_of(product).endswith("attention"):
        query, key = _heads(product)
        forward = 4 * math.prod(query) * key[2]
        return forward * (attention_backward if product.op.endswith("_backward") else 1.0)
    if kind_of(product) == "convolution":
        backward = product.op == "convolution_backward"
        weight, positions = (product.shapes[2], product.shapes[0]) if backward else (product.shapes[1], product.out)
        forward = 2 * math.prod(weight) * positions[0] * math.prod(positions[2:])
        return forward * (2 if backward else 1)
    left, right = product.shapes[:2] if product.op == SCALED else product.shapes[-2:]
    return 2.0 * math.prod(left) * right[-1]


def kind_of(product: Product) -> Kind:
    """Return the row to which a product belongs."""
    if product.op.startswith(("_scaled_dot_product", "short_attention")):
        return "attention" if _heads(product)[1][2] > SHORT else "short_attention"
    return "convolution" if product.op.startswith("convolution") else "matmul"


def _heads(product: Product) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of query and key, ``[B, H, T, head_dim]``."""
    if product.op.startswith("short_attention"):  # beside the packed projection it may have a bias
        batch, tokens, _, heads, head_dim = next(shape for shape in product.shapes if len(shape) == 5)
        return (batch, heads, tokens, head_dim), (batch, heads, tokens, head_dim)
    first = 1 if product.op.endswith("_backward") else 0
    return product.shapes[first], product.shapes[first + 1]


def kernels(network: Emission) -> tuple[Kernels, ...]:
    """Return the kernels of a pass on one sample.

    Raises:
        BenchError: the blocks have more operations than the network, so one of the counts is wrong.
    """
    samples = network.batch
    found = list(products(network.blocks))

    def total(kind: Kind) -> float:
        of_kind = (pair for pair in found if kind_of(pair[1]) == kind and pair[1].op != SCALED)
        return sum(calls * operations(product) for calls, product in of_kind) / samples

    scaled = sum(calls * _filled(product) for calls, product in found if product.op == SCALED) / samples
    inside = sum(calls * operations(product, attention_backward=2.0) for calls, product in found) / samples
    if inside > (1 + _ROUNDING) * network.flops:
        raise BenchError(
            f"the blocks have {inside:.6g} operations per sample, expected at most the network's {network.flops:.6g}"
        )
    copied, streamed = (size / samples for size in _bytes(network.blocks))
    outside = max(network.flops - inside, 0.0)
    return (
        Kernels(name="matrix products", kind="matmul", operations=total("matmul")),
        Kernels(name="products in FP8", kind="matmul", operations=scaled, dtype="fp8"),
        Kernels(name="attention", kind="attention", operations=total("attention")),
        Kernels(name="short attention", kind="short_attention", operations=total("short_attention")),
        Kernels(name="convolutions", kind="convolution", operations=total("convolution")),
        *_elementwise(network, streamed),
        Kernels(name="transposing copies", kind="copies", bytes=copied),
        Kernels(name="products outside the blocks", kind="convolution", operations=outside),
        Kernels(name="kernels outside the blocks", kind="eager", bytes=network.outside_bytes),
    )


def _filled(product: Product) -> float:
    """Return the operations of a product in FP8, and those that its first and last tiles would have time for."""
    tiles = product.shapes[0][1] / 128
    return operations(product) * (tiles + _FP8_FILLING) / tiles


def _elementwise(network: Emission, streamed: float) -> Iterator[Kernels]:
    """Yield the rows of the kernels in blocks: one for each launch that was counted, else one for all bytes."""
    if not network.instructions:
        yield Kernels(name="kernels in blocks", kind="streaming", bytes=streamed)
        return
    for block in network.blocks:
        calls = len(block.names) / network.batch
        for way, one in block.passes:
            for launched in one.elementwise:
                issued = calls * launched.programs
                yield Kernels(
                    name=f"{way} {launched.kernel}", kind="counted", bytes=calls * launched.bytes,
                    instructions=issued * launched.instructions, special=issued * WARP * launched.special,
                    idle=launched.idle(H200.kind),
                )  # fmt: skip
            yield Kernels(name=f"{way} gaps", kind="counted", launches=calls * one.launches)


def products(blocks: Sequence[Block]) -> Iterator[tuple[int, Product]]:
    """Yield every product of the blocks, and how often a step calls it."""
    for block in blocks:
        for _, one in block.passes:
            yield from ((len(block.names), product) for product in one.products)


def _bytes(blocks: Sequence[Block]) -> tuple[float, float]:
    """Return the bytes of transposing copies, and of all other kernels that are no products."""
    calls = [(len(block.names), one) for block in blocks for _, one in block.passes]
    inside = sum(count * one.copied for count, one in calls)
    copied = inside + sum(block.restrided_bytes for block in blocks)
    return copied, sum(count * one.streamed for count, one in calls) - inside


_CLASSES: dict[Kind, Class] = {
    "matmul": "matrix products", "attention": "attention", "short_attention": "attention",
    "convolution": "convolutions", "copies": "copies", "streaming": "elementwise", "eager": "elementwise",
}  # fmt: skip
"""Class in a trace of the rows that are no single kernels."""


def by_class(network: Emission, batch: int) -> dict[str, float]:
    """Return the predicted milliseconds of a step by the classes of ``bench step --trace``.

    Of the flat engine, in the middle. Gaps between kernels are idle time.
    """
    shares = LEVELS["mid"]
    longer = SUSTAINED if network.instructions else 1.0
    work = work_of(network, batch, "flat")
    found: dict[str, float] = dict.fromkeys((*CLASSES, IDLE), 0.0)
    for row in work.kernels:
        if row.kind == "counted":
            kind = IDLE if row.launches else of_kernel(row.name.partition(" ")[2], None)
        else:
            kind = _CLASSES[row.kind]
        found[kind] += 1e3 * longer * batch * row.seconds(H200.kind, work.dtype, shares)
    found["optimizer"] += 1e3 * update_seconds(work, H200, shares)
    return {kind: milliseconds for kind, milliseconds in found.items() if milliseconds}


def work_of(network: Emission, batch: int, engine: str) -> Work:
    """Return a step in bf16 with one micro-batch of ``batch`` samples."""
    stage, optimizer = ENGINES[engine]
    size = network.parameters // network.tensors
    # A micro-batch of any size has as many launches.
    rows = (replace(row, launches=row.launches * network.batch / batch) for row in kernels(network))
    return Work(
        kernels=tuple(rows), dtype="bf16", micro=batch, accumulation=1, zero=Zero.of(OF_STAGE[stage]),
        parameters=(size,) * (network.tensors - 1) + (network.parameters - size * (network.tensors - 1),), frozen=(),
        width=width_of("bf16"), sums=width_of("bf16"), state_bytes=optimizer_family(optimizer).state_bytes(),
        recomputed=0.0,
    )  # fmt: skip


def rates(network: Emission, batch: int, engine: str) -> dict[str, float]:
    """Return the predicted samples per second by level."""
    factors = Factors(passes=SUSTAINED) if network.instructions else None
    found = step_time(work_of(network, batch, engine), H200, factors).whole.under(batch)
    return {"low": found.low, "mid": found.middle, "high": found.high}


def tabulate(network: Emission, batch: int) -> str:
    """Format the milliseconds per sample of each row of kernels by level, then the samples per second by engine."""
    levels = tuple(reversed(LEVELS))
    work = work_of(network, batch, next(iter(ENGINES)))
    cells: list[Sequence[str]] = [("ms per sample", *levels)]
    totals: dict[str, list[float]] = {}
    for row in work.kernels:
        name = row.name.split()[-1] if row.kind == "counted" else row.name
        before = totals.get(name, [0.0] * len(levels))
        times = (1e3 * row.seconds(H200.kind, work.dtype, LEVELS[one]) for one in levels)
        totals[name] = [earlier + time for earlier, time in zip(before, times, strict=True)]
    cells += [(name[:60], *(f"{time:.4f}" for time in times)) for name, times in totals.items()]
    update = (1e3 * update_seconds(work, H200, LEVELS[level]) / batch for level in levels)
    cells.append(("optimizer", *(f"{one:.3f}" for one in update)))
    for name in ENGINES:
        predicted = rates(network, batch, name)
        cells.append((f"samples/s, {name}", *(f"{predicted[level]:.0f}" for level in levels)))
    classes = [
        ("ms per step, flat, mid", ""),
        *((kind, f"{time:.2f}") for kind, time in by_class(network, batch).items()),
    ]
    return f"{table(cells, '<>>>')}\n\n{table(classes, '<>')}"


def rows(preset: str, network: Emission, batch: int) -> Iterator[Measurement]:
    """Yield the prediction as lines of a record: samples per second by engine and level, MFU, times by class."""
    counted = "" if batch == network.batch else f", counted at {network.batch} samples"
    bound = ", by what binds" if network.instructions else ""
    case = f"{preset}, batch {batch}{counted}{bound}, predicted"
    for name in ENGINES:
        for level, value in rates(network, batch, name).items():
            yield Measurement.of("emit", case, name, f"rate at {level}", "samples/s", round(value, 1), "higher")
    of_peak = rates(network, batch, "flat")["mid"] * network.flops / H200.kind.rates["bf16"]
    yield Measurement.of("emit", case, "flat", "mfu at mid", "1", round(of_peak, 4), "higher")
    for kind, milliseconds in by_class(network, batch).items():
        yield Measurement.of("emit", case, "flat", f"time of {kind}", "ms", round(milliseconds, 3), "lower")
