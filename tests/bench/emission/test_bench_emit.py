"""``bench emit``: the code of the compiled blocks, against the figures that are kept, and what it must notice."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastdiff.config.presets import preset
from fastdiff_bench import BenchError
from fastdiff_bench.correctness.baseline import Baseline
from fastdiff_bench.emission import budget, outlook, report, written
from fastdiff_bench.emission.blocks import Block, Emission, Layout, Node, Pass, Product
from fastdiff_bench.emission.command import PRESETS
from fastdiff_bench.emission.subject import Subject
from fastdiff_bench.emission.worker import emitted
from fastdiff_bench.instructions.bounds import Launched
from fastdiff_bench.records import readme
from fastdiff_bench.records.fingerprint import ROOT
from fastdiff_bench.records.number_format import number
from fastdiff_bench.records.record import RESULTS, Log, Measurement, read_all
from tests.support.waiting import LIMIT_S

KEPT = RESULTS / "emission"
"""If torch or a block changed and the figures with them: ``fastdiff bench emit`` writes a record in their place."""


def test_the_blocks_of_dit_copy_nothing_and_are_not_worse_than_kept() -> None:
    emission = emitted(Subject("dit-xl-2-256", depth=2), 64, 90)
    (dit,) = emission.blocks
    assert [(way, one.copies) for way, one in dit.passes] == [("forward", 0), ("backward", 0)]
    assert dit.restrided == 0
    against_kept("dit-xl-2-256", emission, totals=False)


@pytest.mark.nightly
@pytest.mark.parametrize("name", PRESETS)
def test_whole_networks_are_not_worse_than_kept(name: str) -> None:
    against_kept(name, emitted(Subject(name), 64, 90), totals=True)


@pytest.mark.nightly
def test_a_wide_dit_is_not_worse_than_kept() -> None:
    wide = Subject("dit-xl-2-256", 2, ("hidden=2048", "heads=32"))
    against_kept(wide.name, emitted(wide, 64, 90), totals=False)


def test_all_products_of_a_block_in_fp8_have_one_scale_per_operand() -> None:
    """Three of each of the four layers on tokens, no other product on them, and no copy between."""
    network = Subject("dit-xl-2-256", 2, fp8=True)
    emission = emitted(network, 64, 90)
    (dit,) = emission.blocks
    scales = [
        [one.shapes[2] for one in passed.products if one.op == "_scaled_mm"]
        for passed in (dit.forward, dit.backward)
        if passed
    ]
    assert scales == [[(1, 1)] * 4, [(1, 1)] * 8]
    against_kept(network.name, emission, totals=False)


def against_kept(name: str, emission: Emission, *, totals: bool) -> None:
    """Compare with the newest record."""
    not_worse_than_kept([row for row in report.rows(name, emission.blocks, {}) if totals or row.provider != "step"])


def not_worse_than_kept(rows: Sequence[Measurement]) -> None:
    """Compare with the newest record, if it is of this torch: another one writes other code."""
    cases = {row.case for row in rows}
    kept = [one.fingerprint for one in read_all([KEPT]) if cases & {row.case for row in one.measurements}]
    if max(kept, key=lambda fingerprint: fingerprint.date).torch != torch.__version__:
        return
    text, worse = Baseline.read(KEPT, report.BENCH, lambda row: row.case in cases).compare(rows)
    assert not worse, text
    assert f"{len(rows)} compared" in text, text


@pytest.mark.nightly
def test_a_transposed_stream_is_noticed() -> None:
    """Its strides are those of patches that a convolution wrote: each tangent is copied, and inputs inside the ops."""
    code = """
from fastdiff_bench.emission import fake_gpu
fake_gpu.install(90)
from fastdiff_bench.emission import network
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.models.embeddings import PatchEmbed
straight = PatchEmbed.forward
PatchEmbed.forward = lambda self, x: straight(self, x).transpose(1, 2).contiguous().transpose(1, 2)
emission = network.emit(DiTConfig(depth=2, hidden=128, heads=2), 4, 90)
(block,) = emission.blocks
assert block.output.strides == (256 * 128, 1, 256), block.output
assert (block.restrided, block.backward.copies) == (2, 3), (block.restrided, block.backward.opaque)
"""
    in_another_process(code)


@pytest.mark.nightly
def test_weights_of_convolutions_are_copied_unless_they_have_the_layout_of_the_maps() -> None:
    """Weights and their gradients, 2 bytes read and 2 written each per weight."""
    code = """
from fastdiff_bench.emission import fake_gpu
fake_gpu.install(90)
import torch
from fastdiff_bench.emission import network
from fastdiff.config.networks.adm import AdmConfig
from fastdiff.models.build import build_model
config = AdmConfig(channels=4, size=16, width=64, channel_mult=(1, 2), res_blocks=1, heads=2)
def streamed():
    torch._dynamo.reset()
    emission = network.emit(config, 2, 90)
    return sum(one.streamed * len(block.names) for block in emission.blocks for _, one in block.passes)
straight = streamed()
network._lay_out = lambda model, dtype: None
copied = streamed() - straight
model = build_model(config)
blocks = [block for block in model.modules() if isinstance(block, model.block_classes)]
kernels = sum(p.numel() for block in blocks for p in block.parameters() if p.dim() == 4 and p.shape[-1] > 1)
assert copied == 8 * kernels, (copied, kernels)
"""
    in_another_process(code)


def in_another_process(code: str) -> None:
    """Run code that fakes a GPU for its whole process."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'bench'}"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        (Subject("dit-xl-3"), "--preset dit-xl-3: unknown"),
        (Subject("sd2-512", 2), "--depth 2: the network of sd2-512 has levels"),
        (Subject("dit-xl-2-256", model=("hiden=2048",)), "--model: .*hiden"),
        (Subject("dit-xl-2-256", model=("hidden",)), "--model hidden: expected NAME=VALUE"),
        (Subject("dit-s-2-256", fp8=True), "this network has 384 and 1152 and 1536"),
        (Subject("dit-xl-2-256", weight_gradients="bf16"), "change nothing in 16 bits"),
    ],
)
def test_what_cannot_be_emitted_is_refused(subject: Subject, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        emitted(subject, 64, 90)


def test_a_network_with_changes_has_their_names() -> None:
    wide = Subject("dit-xl-2-256", 2, ("hidden=2048", "heads=32"), fp8=True)
    assert wide.name == "dit-xl-2-256 hidden=2048 heads=32 fp8"
    assert wide.config() == replace(preset("dit-xl-2-256").model, depth=2, hidden=2048, heads=32)
    others = Subject("dit-xl-2-256", fp8=True, weight_gradients="bf16", attention="short")
    assert others.name == "dit-xl-2-256 fp8 weight_gradients=bf16 attention=short"


def block(*, copied: int = 0, restrided: int = 0) -> Block:
    """A block of two products and one kernel, on 2 samples of 4 x 8."""
    stream = Layout("x", (2, 4, 8), (32, 8, 1), "bfloat16")
    product = Product("mm", ((8, 8), (8, 8)), (8, 8))
    nodes = [Node("kernel", "triton", 256, 1), Node("extern_kernels.mm", "extern", 384, 1)]
    forward = Pass(1, nodes, [stream], [stream], [stream], [], [product], "")
    backward = replace(forward, saved=[], products=[product, product])
    return Block("Block", ["a", "b"], forward, backward, restrided, 256 * restrided)


def figures(found: Block) -> dict[tuple[str, str], Measurement]:
    return {(row.provider, row.quantity): row for row in report.rows("toy", [found], {})}


def test_figures_of_a_block_and_of_all_blocks() -> None:
    found = figures(block(restrided=2))
    assert found["forward", "launches"].value == 2
    assert found["forward", "bytes"].value == 256 / 64
    assert found["forward", "saved"].value == 64
    assert found["backward", "copies"].value == 1
    assert found["backward", "bytes"].value == (256 + 256) / 64
    assert found["step", "launches"].value == 2 * (2 + 2)
    assert found["step", "copies"].value == 2
    assert found["step", "bytes"].value == round(2 * (256 + 256 + 256) / 2 / 1e6, 4)


def test_every_figure_can_get_worse() -> None:
    before = tuple(figures(block()).values())
    worse = [replace(row, value=row.value + 1) for row in before]
    text, found = Baseline(KEPT, "", before).compare(worse)
    assert found
    assert f"{len(before)} worse" in text


def test_operations_of_products_convolutions_and_attention() -> None:
    heads = (2, 16, 256, 72)
    forward = Product("_scaled_dot_product_cudnn_attention", (heads, heads, heads), heads)
    assert budget.operations(forward) == 4 * 2 * 16 * 256 * 256 * 72
    back = Product("_scaled_dot_product_cudnn_attention_backward", (heads, heads, heads, heads), heads)
    assert budget.operations(back) == 2.5 * budget.operations(forward)
    assert budget.operations(back, attention_backward=2.0) == 2 * budget.operations(forward)
    packed, out, lse = (2, 256, 3, 16, 72), (2, 256, 16 * 72), (2, 16, 256)
    short = Product("short_attention", (packed, (3 * 64,)), out)
    assert budget.operations(short) == budget.operations(forward)
    short_back = Product("short_attention_backward", (out, out, lse, packed), packed)
    assert budget.operations(short_back) == budget.operations(back)
    maps, weight = (2, 320, 64, 64), (640, 320, 3, 3)
    convolution = Product("convolution", (maps, weight), (2, 640, 64, 64))
    assert budget.operations(convolution) == 2 * 640 * 320 * 9 * 2 * 64 * 64
    assert budget.operations(Product("addmm", ((8,), (4, 6), (6, 8)), (4, 8))) == 2 * 4 * 6 * 8


def test_attention_in_blocks_leaves_the_operations_outside() -> None:
    """Its kernels repeat the scores, 2.5 times the forward's operations; the network is counted with 2."""
    heads = (2, 16, 256, 64)
    forward = Product("_scaled_dot_product_flash_attention", (heads, heads, heads), heads)
    backward = Product("_scaled_dot_product_flash_attention_backward", (heads, heads, heads, heads), heads)
    found = block()
    assert found.forward is not None
    assert found.backward is not None
    found.forward.products, found.backward.products = [forward], [backward]
    inside = 2 * 3 * budget.operations(forward) / 2  # of two blocks, per sample
    exact, more = (
        {row.name: row.operations for row in budget.kernels(Emission([found], 2, 0, 0, flops, 0.0))}
        for flops in (inside, inside + 5e12)
    )
    assert exact["products outside the blocks"] == 0
    assert more["products outside the blocks"] == pytest.approx(5e12)
    assert more["short attention"] == pytest.approx(2 * 3.5 * budget.operations(forward) / 2)
    with pytest.raises(BenchError, match=r"the blocks have .* operations per sample, expected at most"):
        budget.kernels(Emission([found], 2, 0, 0, 0.9 * inside, 0.0))


def test_less_copying_and_a_leaner_engine_are_faster() -> None:
    toy = Emission([block(restrided=2)], 2, 10**9, 300, 1e12, 1e6)
    straight = replace(toy, blocks=[block()])
    slow, fast = (budget.rates(one, 256, "flat") for one in (toy, straight))
    assert all(slow[level] < fast[level] for level in slow)
    assert slow["low"] < slow["mid"] < slow["high"]
    by_engine = [budget.rates(toy, 256, engine)["mid"] for engine in budget.ENGINES]
    assert by_engine == sorted(by_engine)
    assert all(name in budget.tabulate(toy, 256) for name in (*budget.ENGINES, "transposing copies", "optimizer"))


def test_predictions_are_set_against_those_of_the_first_network(tmp_path: Path) -> None:
    """Twice the operations in more time: fewer samples per second, a larger share of the peak."""
    toy = Emission([block()], 2, 10**9, 300, 1e12, 1e6)
    with Log(tmp_path / "emit.jsonl") as log:
        log.write(*budget.rows("dit", toy, 256), *budget.rows("dit mlp=swiglu", replace(toy, flops=2e12), 256))
    text = readme.rendered("<!-- bench: predicted-shares . -->\n<!-- end bench -->\n", tmp_path)
    first, second = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| dit"))
    assert (first[0], first[2], first[4]) == ("dit", "1.000", "1.000")
    rate = budget.rates(toy, 256, "flat")["mid"]
    assert first[1] == number(round(rate, 1))
    assert float(first[3].rstrip(" %")) == pytest.approx(100 * rate * 1e12 / 989e12, abs=0.06)
    assert second[0] == "dit mlp=swiglu"
    assert 0.5 < float(second[2]) < 1 < float(second[4]) < 2
    assert float(second[4]) == pytest.approx(2 * float(second[2]), abs=2e-3)


def counted(programs: int = 1056) -> Launched:
    """A kernel of 4 warps and 64 registers, of which 1,056 programs are one wave."""
    return Launched("kernel", programs, 4, 64, 0, 10**9, 10**8, 1000.0, 10.0, 0.25)


def test_counted_kernels_have_rows_of_their_own_and_their_gaps() -> None:
    found = block()
    assert found.forward is not None
    found.forward.written = [counted(), counted(1584)]
    rows = [one for one in budget.kernels(Emission([found], 2, 0, 0, 1e15, 0.0, True)) if one.kind == "counted"]
    first, second, gaps, _ = rows
    assert (first.name, gaps.name) == ("forward kernel", "forward gaps")
    assert first.instructions == 2 / 2 * 1056 * 1000
    assert first.special == 1056 * 10 * 32
    assert first.idle == 1.0
    assert second.idle == pytest.approx(2 / 1.5)
    assert gaps.launches == 2


def test_the_prediction_has_the_classes_of_a_trace() -> None:
    found = block()
    assert found.forward is not None
    names = ("group_norm_fwd_apply_kernel", "geglu_backward_kernel", "triton_poi_fused_add_1")
    found.forward.written = [replace(counted(), kernel=name) for name in names]
    found.forward.products = [Product("convolution", ((2, 320, 64, 64), (640, 320, 3, 3)), (2, 640, 64, 64))]
    predicted = budget.by_class(Emission([found], 2, 10**6, 10, 1e15, 0.0, True), 2)
    assert predicted.keys() == {
        "matrix products", "convolutions", "group norms", "activations", "elementwise", "optimizer", "idle",
    }  # fmt: skip
    assert predicted["group norms"] == predicted["activations"] == predicted["elementwise"] > 0
    of_more = budget.by_class(Emission([found], 2, 10**6, 10, 1e15, 0.0, True), 8)
    assert of_more["elementwise"] == pytest.approx(4 * predicted["elementwise"])
    assert of_more["idle"] == pytest.approx(predicted["idle"]), "as many launches"


def test_a_kernel_inside_another_has_no_launch() -> None:
    """Of three scheduled nodes the code launches two; names of buffers tell which."""
    nodes = [Node(name, "triton", size, 1, frozenset((name,))) for name, size in (("b1", 10), ("b2", 20), ("b3", 30))]
    runs = [("first", "b0, b1, 64"), ("second", "b1, b3, 64")]
    assert [node.bytes for node in written._scheduled(runs, nodes)] == [10, 30]
    assert list(written._scheduled([("k", "b9")] * 3, nodes)) == nodes
    with pytest.raises(BenchError, match="launches k, which is none of the 3 kernels"):
        list(written._scheduled([("k", "b9")], nodes))


def test_each_change_to_come_adds_to_the_rate() -> None:
    found = block()
    assert found.forward is not None
    tokens, heads = (16_384, 1152), (64, 16, 256, 72)
    product = Product("mm", (tokens, (1152, 4608)), (16_384, 4608))
    attention = Product("_scaled_dot_product_cudnn_attention", (heads, heads, heads), heads)
    found.forward.products, found.forward.written = [product, attention], [counted()]
    network = Emission([found], 64, 10**6, 10, 1e15, 0.0, True)
    rates = outlook.rates(network, 64)
    assert [name for name, _ in rates] == ["as counted", *(change.name for change in outlook.CHANGES)]
    values = [rate for _, rate in rates]
    assert values == sorted(values)
    assert len(set(values)) == len(values)
    assert values[0] == pytest.approx(budget.rates(network, 64, "flat")["mid"])
    assert all(name in outlook.tabulate(network, 64) for name, _ in rates)
    assert outlook.applies(network)
    assert not outlook.applies(replace(network, instructions=False))
    assert not outlook.applies(replace(network, blocks=[found, block()]))
    found.forward.products = [product]
    assert not outlook.applies(network), "no attention"


def test_counted_kernels_are_in_the_record_and_the_table() -> None:
    found = block()
    assert found.forward is not None
    found.forward.written = [counted(), counted(1584)]
    rows = {(row.provider, row.quantity): row for row in report.launch_rows("toy", [found], 90)}
    assert rows["forward kernel", "waves"].value == 1
    assert rows["forward kernel 2", "waves"].value == 1.5
    assert rows["forward kernel", "instructions"].value == round(32 * 1056 * 1000 / 10**8, 3)
    assert rows["forward kernel", "masked lanes"].value == 0.25
    sum_of_both = rows["forward kernel", "least time"].value + rows["forward kernel 2", "least time"].value
    assert rows["forward", "least time"].value == pytest.approx(sum_of_both, abs=0.01)
    assert "kernel 2" in report.tabulate_launches(found, 90)
    assert "one trip" not in report.tabulate_launches(found, 90)


def test_kernels_whose_loops_depend_on_data_are_named() -> None:
    found = block()
    assert found.forward is not None
    found.forward.written = [replace(counted(), kernel="search_kernel", counted=False), counted()]
    said = "loops that depend on data, counted as one trip, in 1 of 2 launches: search_kernel"
    assert said in report.tabulate_launches(found, 90)
    rows = {(row.provider, row.quantity): row for row in report.launch_rows("toy", [found], 90)}
    assert rows["forward", "least time"].facts["counted once"] == said
    assert rows["forward search_kernel", "waves"].value == 1
    assert ("forward search_kernel", "instructions") not in rows


@pytest.mark.nightly
def test_what_binds_the_kernels_of_a_dit_block_is_not_worse_than_kept() -> None:
    emission = emitted(Subject("dit-xl-2-256", depth=2), 256, 90, instructions=True)
    rows = list(report.launch_rows("dit-xl-2-256", emission.blocks, 90))
    assert {row.provider for row in rows} >= {"forward", "backward", "backward adaln_bwd_kernel"}
    not_worse_than_kept(rows)


def test_products_in_fp8_have_their_own_rate() -> None:
    row = Product("_scaled_mm", ((16_384, 2048), (2048, 8192), (16_384, 1), (1, 8192)), (16_384, 8192))
    assert budget.operations(row) == 2 * 16_384 * 8192 * 2048
    found = block()
    assert found.forward is not None
    found.forward.products = [row]
    rows = {one.name: one for one in budget.kernels(Emission([found], 2, 0, 0, 1e15, 0.0))}
    tiles = 2048 / 128
    assert rows["products in FP8"].operations == budget.operations(row) * (tiles + 3) / tiles
    assert rows["products in FP8"].dtype == "fp8"
