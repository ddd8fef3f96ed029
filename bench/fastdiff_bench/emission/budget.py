"""Predicted seconds of a training step on one GPU, from counts of the compiled blocks and assumed rates.

An item is a sum over the whole step, divided by its samples: products of matrices, attention, convolutions, the bytes
that all other kernels in the blocks stream, transposing copies, what runs outside the blocks, and the optimizer. Host
time is left out: it hides behind the device at these batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fastdiff_bench import BenchError
from fastdiff_bench.emission.blocks import Block, Emission, Product
from fastdiff_bench.emission.rates import (
    BANDWIDTH,
    CONVOLUTION_FLOPS,
    ENGINES,
    FIRST,
    FP8_FLOPS,
    GEMM_FLOPS,
    LAUNCH_SECONDS,
    LEVELS,
    LONG_ATTENTION_FLOPS,
    ROWWISE_SHARE,
    SHORT_ATTENTION_FLOPS,
    SYNCHRONISATION_SECONDS,
    TRANSPOSING_BANDWIDTH,
    Engine,
    Level,
)
from fastdiff_bench.records.record import Measurement
from fastdiff_bench.records.tables import table

_PROCESSORS = 132
"""Of an H200."""
_DEPTH = 128
"""Bytes of reduced elements per iteration of a tile."""
_OVERHEAD = 2
"""Prologue and epilogue of a tile, in iterations."""
_TILES = {(128, 256): 1.0, (256, 128): 1.0, (128, 192): 0.97, (128, 128): 0.90}
"""Tiles of cuBLAS on sm_90, with their share of the best rate."""
_SPLITS = (1, 2, 3, 4, 6, 8, 12)
_SHORT = 256
"""Tokens up to which attention has the rate of short sequences."""
_PADDED = 32
"""Multiple to which kernels of attention pad a head."""
_SCALED = "_scaled_mm"
"""Product in FP8; its first arguments are the factors and their scales."""
_ROUNDING = 1e-6
"""Share by which sums of counts may differ."""


def product_seconds(rows: int, columns: int, depth: int, level: Level) -> float:
    """Seconds of a matrix product ``[rows, depth] x [depth, columns]`` in 16 bits; see ``_tiled``."""
    return _tiled(rows, columns, depth, 2, GEMM_FLOPS[level], BANDWIDTH[level])


def scaled_product_seconds(rows: int, columns: int, depth: int, level: Level, *, rowwise: bool) -> float:
    """Seconds of the same product in FP8 with a result in 16 bits; ``rowwise``: each row and column has a scale."""
    rate = FP8_FLOPS[level] * (ROWWISE_SHARE[level] if rowwise else 1.0)
    return _tiled(rows, columns, depth, 1, rate, BANDWIDTH[level])


def _tiled(rows: int, columns: int, depth: int, size: int, flops: float, bandwidth: float) -> float:
    """Seconds of a matrix product whose operands have ``size`` bytes per element, and its result two.

    Tiles fill the processors in waves; a partial wave takes as long as a full one. A split of the reduction adds fp32
    partial sums. The least is the time to read the operands and write the result.
    """
    streamed = (size * (rows * depth + depth * columns) + 2 * rows * columns) / bandwidth
    step = _DEPTH // size
    times = [math.inf]
    for (height, width), share in _TILES.items():
        iteration = 2 * height * width * step / (flops / _PROCESSORS * share)
        tiles = math.ceil(rows / height) * math.ceil(columns / width)
        for split in _SPLITS:
            waves = math.ceil(tiles * split / _PROCESSORS)
            partial = 8 * split * rows * columns / bandwidth if split > 1 else 0.0
            times.append(waves * (math.ceil(depth / split / step) + _OVERHEAD) * iteration + partial)
    return max(min(times), streamed)


def operations(product: Product, attention_backward: float = 2.5) -> float:
    """Return the operations of a product; a backward pass has twice those of the forward.

    Args:
        product: matrix product, convolution or attention.
        attention_backward: the same of attention: 2.5 as its kernels compute, since they repeat the scores; 2 as
            ``training_flops`` counts.
    """
    if _attends(product):
        query, key = _heads(product)
        forward = 4 * math.prod(query) * key[2]
        return forward * (attention_backward if product.op.endswith("_backward") else 1.0)
    if product.op.startswith("convolution"):
        backward = product.op == "convolution_backward"
        weight, positions = (product.shapes[2], product.shapes[0]) if backward else (product.shapes[1], product.out)
        forward = 2 * math.prod(weight) * positions[0] * math.prod(positions[2:])
        return forward * (2 if backward else 1)
    batch, rows, columns, depth = _sides(product)
    return 2.0 * batch * rows * columns * depth


def _attends(product: Product) -> bool:
    return product.op.startswith(("_scaled_dot_product", "short_attention"))


def _heads(product: Product) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of query and key, ``[B, H, T, head_dim]``."""
    if product.op.startswith("short_attention"):  # the last argument is the packed projection
        batch, tokens, _, heads, head_dim = product.shapes[-1]
        return (batch, heads, tokens, head_dim), (batch, heads, tokens, head_dim)
    first = 1 if product.op.endswith("_backward") else 0
    return product.shapes[first], product.shapes[first + 1]


def _sides(product: Product) -> tuple[int, int, int, int]:
    """Return batch, rows, columns and reduced elements of a matrix product."""
    left, right = product.shapes[:2] if product.op == _SCALED else product.shapes[-2:]
    return math.prod(left[:-2]), left[-2], right[-1], left[-1]


def _seconds(product: Product, level: Level) -> tuple[str, float]:
    """Return the item and the seconds of a product."""
    work = operations(product)
    if _attends(product):
        query, _ = _heads(product)
        if query[2] > _SHORT:
            return "attention", work / LONG_ATTENTION_FLOPS[level]
        padded = math.ceil(query[3] / _PADDED) * _PADDED / query[3]
        return "attention", work * padded / SHORT_ATTENTION_FLOPS[level]
    if product.op.startswith("convolution"):
        return "convolutions", work / CONVOLUTION_FLOPS[level]
    batch, rows, columns, depth = _sides(product)
    if product.op == _SCALED:
        rowwise = math.prod(product.shapes[2]) > 1
        return "products in FP8", scaled_product_seconds(rows, columns, depth, level, rowwise=rowwise)
    return "matrix products", batch * product_seconds(rows, columns, depth, level)


def items(network: Emission, batch: int, engine: Engine, level: Level) -> dict[str, float]:
    """Return the milliseconds per sample of each item of a step with one micro-batch of ``batch`` samples."""
    samples, blocks = network.batch, network.blocks
    found = dict.fromkeys(("matrix products", "products in FP8", "attention", "convolutions"), 0.0)
    inside = 0.0
    for calls, product in _products(blocks):
        item, seconds = _seconds(product, level)
        found[item] += calls * seconds / samples
        inside += calls * operations(product, attention_backward=2.0) / samples
    copied, streamed = _bytes(blocks)
    rest = _rest(network.flops, inside)
    found["kernels in blocks"] = streamed / samples / BANDWIDTH[level]
    found["transposing copies"] = copied / samples / TRANSPOSING_BANDWIDTH[level]
    found["outside the blocks"] = network.outside_bytes / BANDWIDTH[level] + rest / CONVOLUTION_FLOPS[level]
    found["optimizer"] = _optimizer(network, engine, level) / batch
    found["synchronisations"] = engine.synchronisations * SYNCHRONISATION_SECONDS[level] / batch
    return {item: 1e3 * seconds for item, seconds in found.items()}


def _rest(whole: float, inside: float) -> float:
    """Return the operations outside the blocks.

    Raises:
        BenchError: the blocks have more than the network, so one of the counts is wrong.
    """
    if inside > (1 + _ROUNDING) * whole:
        raise BenchError(
            f"the blocks have {inside:.6g} operations per sample, expected at most the network's {whole:.6g}"
        )
    return max(whole - inside, 0.0)


def _products(blocks: Sequence[Block]) -> Iterator[tuple[int, Product]]:
    for block in blocks:
        for _, one in block.passes:
            yield from ((len(block.names), product) for product in one.products)


def _bytes(blocks: Sequence[Block]) -> tuple[float, float]:
    """Return the bytes of transposing copies, and of all other kernels that are no products."""
    calls = [(len(block.names), one) for block in blocks for _, one in block.passes]
    inside = sum(count * one.copied for count, one in calls)
    copied = inside + sum(block.restrided_bytes for block in blocks)
    return copied, sum(count * one.streamed for count, one in calls) - inside


def _optimizer(network: Emission, engine: Engine, level: Level) -> float:
    launches = engine.launches + engine.launches_per_tensor * network.tensors
    return engine.bytes_per_parameter * network.parameters / BANDWIDTH[level] + launches * LAUNCH_SECONDS[level]


def tabulate(network: Emission, batch: int, first: str = FIRST) -> str:
    """Format the budget: milliseconds per sample by item and level, then samples per second with each engine."""
    columns = [items(network, batch, ENGINES[first], level) for level in LEVELS]
    cells: list[Sequence[str]] = [("ms per sample", *LEVELS)]
    cells += [(item, *(f"{column[item]:.3f}" for column in columns)) for item in columns[0]]
    cells.append((f"sum, {first}", *(f"{sum(column.values()):.3f}" for column in columns)))
    for name, engine in ENGINES.items():
        rates = (throughput(network, batch, engine, level) for level in LEVELS)
        cells.append((f"samples/s, {name}", *(f"{rate:.0f}" for rate in rates)))
    return table(cells, "<>>>")


def rows(preset: str, network: Emission, batch: int) -> Iterator[Measurement]:
    """Yield the prediction as lines of a record: samples per second by engine and level."""
    counted = "" if batch == network.batch else f", counted at {network.batch} samples"
    for name, engine in ENGINES.items():
        for level in LEVELS:
            value = round(throughput(network, batch, engine, level), 1)
            yield Measurement(
                bench="emit", case=f"{preset}, batch {batch}{counted}, predicted", provider=name,
                quantity=f"rate at {level}", unit="samples/s", value=value, better="higher",
            )  # fmt: skip


def throughput(network: Emission, batch: int, engine: Engine, level: Level) -> float:
    """Return the predicted samples per second."""
    return 1e3 / sum(items(network, batch, engine, level).values())
