"""Rows of a record and the table on the terminal, from the counts of compiled blocks."""

from collections.abc import Iterator, Sequence

from fastdiff_bench.emission.blocks import Block, Layout, Pass, Way
from fastdiff_bench.instructions.bounds import Launched, counted_once
from fastdiff_bench.instructions.gpus import GPUS
from fastdiff_bench.records.record import Fact, Measurement
from fastdiff_bench.records.tables import table

BENCH = "emit"


def case(preset: str, block: Block) -> str:
    """Name of a block in records: preset, class, output shape of a sample and first block with this code."""
    shape = "x".join(map(str, block.output.shape[1:]))
    return f"{preset}, {block.kind} {shape}, {block.names[0]}"


def rows(preset: str, blocks: Sequence[Block], facts: dict[str, Fact]) -> Iterator[Measurement]:
    """Yield the lines of the record: each block forward and backward, and the sum over all blocks."""
    for block in blocks:
        for way, one in block.passes:
            about = {**facts, "blocks": len(block.names), **_layouts(block, way, one)}
            for quantity, unit, value in _quantities(block, way, one):
                name = case(preset, block)
                yield Measurement.of(BENCH, name, way, quantity, unit, round(value, 4), "lower", facts=about)
    total = {**facts, "blocks": sum(len(block.names) for block in blocks)}
    for quantity, unit, value in totals(blocks):
        name = f"{preset}, all blocks"
        yield Measurement.of(BENCH, name, "step", quantity, unit, round(value, 4), "lower", facts=total)


def totals(blocks: Sequence[Block]) -> list[tuple[str, str, float]]:
    """Return quantity, unit and value of one step of all blocks of a network."""
    calls = [(block, len(block.names), one) for block in blocks for _, one in block.passes]
    samples = blocks[0].output.shape[0]
    moved = sum(count * one.streamed for _, count, one in calls) + sum(block.restrided_bytes for block in blocks)
    copies = sum(count * one.copies for _, count, one in calls) + sum(block.restrided for block in blocks)
    saved = sum(len(block.names) * block.saved for block in blocks)
    return [
        ("launches", "1", sum(count * one.launches for _, count, one in calls)),
        ("copies", "1", copies),
        ("bytes", "MB/sample", moved / samples / 1e6),
        ("saved", "MB/sample", saved / samples / 1e6),
    ]


def _quantities(block: Block, way: Way, one: Pass) -> Iterator[tuple[str, str, float]]:
    calls = len(block.names)
    tangents = (block.restrided / calls, block.restrided_bytes / calls) if way == "backward" else (0.0, 0.0)
    yield "kernels", "1", one.kernels
    yield "launches", "1", one.launches
    yield "bytes", "B/element", (one.streamed + tangents[1]) / block.elements
    yield "copies", "1", one.copies + tangents[0]
    if way == "forward":
        yield "saved", "B/sample", block.saved / block.output.shape[0]


def _layouts(block: Block, way: Way, one: Pass) -> dict[str, Fact]:
    """Return the strides at the borders of a graph, and the shapes of copies inside ops."""
    copies = "; ".join(f"{op.name}: {list(shape)}" for op in one.opaque for shape in op.copies)
    if way == "forward":
        inputs = [layout for layout in one.inputs if len(layout.shape) > 1]
        return {"inputs": _strides(inputs), "outputs": _strides(one.outputs), "copied": copies}
    tangents = [layout for layout in one.inputs if layout.name.startswith("tangents")]
    return {"tangents": _strides(tangents), "gradients": _strides(_streams(block, one)), "copied": copies}


def _streams(block: Block, one: Pass) -> list[Layout]:
    """Return the gradients of the block's inputs, without those of its parameters."""
    samples = block.output.shape[0]
    return [layout for layout in one.outputs if len(layout.shape) > 1 and layout.shape[0] == samples]


def _strides(layouts: Sequence[Layout]) -> str:
    return " ".join(f"{list(one.shape)}:{list(one.strides)}" for one in layouts)


def tabulate(blocks: Sequence[Block]) -> str:
    """Format the counts for the terminal, one line per block, forward and backward."""
    cells: list[tuple[str, ...]] = [
        ("block", "", "x", "kernels", "launches", "B/element", "copies", "saved, MB/sample", "first block")
    ]
    for block in blocks:
        shape = "x".join(map(str, block.output.shape[1:]))
        for way, one in block.passes:
            found = {quantity: value for quantity, _, value in _quantities(block, way, one)}
            saved = f"{found['saved'] / 1e6:.2f}" if "saved" in found else ""
            cells.append(
                (
                    f"{block.kind} {shape}", way, str(len(block.names)), f"{found['kernels']:g}",
                    f"{found['launches']:g}", f"{found['bytes']:.2f}", f"{found['copies']:g}", saved, block.names[0],
                )
            )  # fmt: skip
    return table(cells, "<<>>>>>><")


def launch_rows(preset: str, blocks: Sequence[Block], arch: int) -> Iterator[Measurement]:
    """Yield what binds each counted kernel of each block, and the sum of a pass."""
    for block in blocks:
        for way, one in block.passes:
            name = f"{case(preset, block)}, batch {block.output.shape[0]}"
            for kernel, launched in _named(one.kernels_counted):
                yield from _launch(name, f"{way} {kernel}", launched, arch)
            if one.kernels_counted:
                total = sum(launched.bound(GPUS[arch])[1] for launched in one.elementwise)
                about: dict[str, Fact] = {"counted once": counted_once(one.elementwise)}
                yield Measurement.of(BENCH, name, way, "least time", "us", round(1e6 * total, 2), "lower", facts=about)


def _named(launches: Sequence[Launched]) -> Iterator[tuple[str, Launched]]:
    """Yield launches with names; the second of a kernel has a number."""
    seen: dict[str, int] = {}
    for one in launches:
        seen[one.kernel] = seen.get(one.kernel, 0) + 1
        yield one.kernel + (f" {seen[one.kernel]}" if seen[one.kernel] > 1 else ""), one


def _launch(name: str, kernel: str, one: Launched, arch: int) -> Iterator[Measurement]:
    gpu = GPUS[arch]
    by, seconds = one.bound(gpu)
    facts: dict[str, Fact] = {"by": by, "programs": one.programs, "warps": one.warps, "registers": one.registers}
    facts |= {f"{resource}, us": round(1e6 * time, 3) for resource, time in one.seconds(gpu).items()}
    facts["trips of loops"] = "known" if one.counted else "depend on data"
    yield Measurement.of(BENCH, name, kernel, "waves", "1", round(one.waves(gpu), 3), "neither", facts=facts)
    if one.counted:
        for quantity, unit, value in (
            ("instructions", "1/element", one.per_element),
            ("special functions", "1/element", one.special_per_element),
            ("masked lanes", "1", one.masked),
            ("least time", "us", 1e6 * seconds),
        ):
            yield Measurement.of(BENCH, name, kernel, quantity, unit, round(value, 3), "lower", facts=facts)


def tabulate_launches(block: Block, arch: int) -> str:
    """Format what binds each counted kernel of a block."""
    gpu = GPUS[arch]
    cells: list[Sequence[str]] = [
        (
            f"kernel of {block.kind}", "", "programs", "warps", "regs", "waves", "warps/SM", "instr/elem", "MUFU/elem",
            "masked", "bytes us", "issue us", "MUFU us", "by",
        )
    ]  # fmt: skip
    for way, passed in block.passes:
        for kernel, one in _named(passed.kernels_counted):
            seconds = one.seconds(gpu)
            times = (f"{1e6 * seconds[name]:.1f}" for name in ("bytes", "issue", "special"))
            cells.append(
                (
                    kernel[:48], way, str(one.programs), str(one.warps), str(one.registers), f"{one.waves(gpu):.2f}",
                    f"{one.warps_per_processor(gpu):.1f}", f"{one.per_element:.2f}", f"{one.special_per_element:.2f}",
                    f"{one.masked:.2f}", *times, one.bound(gpu)[0] if one.counted else "a loop depends on data",
                )
            )  # fmt: skip
    once = counted_once(one for _, passed in block.passes for one in passed.kernels_counted)
    return "\n".join(filter(None, (table(cells, "<<>>>>>>>>>>><"), once)))
