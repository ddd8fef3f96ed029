"""``bench aot``: it compiles the code that a GPU would launch, and it finds faults and regressions."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import pytest
import torch

from fastdiff_bench import BenchError
from fastdiff_bench.__main__ import main
from fastdiff_bench.cases import KERNELS, cases
from fastdiff_bench.cases.case import Case
from fastdiff_bench.commands import aot
from fastdiff_bench.correctness.assembly import Side, access_widths
from fastdiff_bench.instructions import launches
from fastdiff_bench.records import record
from fastdiff_bench.records.fingerprint import ROOT
from fastdiff_bench.records.record import RESULTS, Log, Measurement
from fastdiff_kernels import launch
from fastdiff_kernels.launch import Launch
from tests.support.benches.bench_kernels import LAUNCHING, square_kernel

KEPT = RESULTS / "aot"
"""After a kernel improves: ``python -m fastdiff_bench aot KERNEL`` writes a record, which replaces its figures."""
OF_DIT = ("adaln", "bias_gradient", "gelu")
"""Files with kernels of a DiT block."""
COUNTS = ("waves", "warps per processor", "instructions", "special functions", "masked lanes", "least time")
"""Of a launch with the batch of a training step."""

Run = Callable[..., Any]
"""Calls its first argument with the others, in another process."""


@pytest.fixture(scope="module")
def compiler() -> Iterator[Run]:
    """Runs functions, one after the other, in a process that sees no GPU and does not interpret kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        executor = ProcessPoolExecutor(1, SpawnContext())
        executor.submit(os.getpid).result()
    with executor:
        yield lambda function, *given: executor.submit(function, *given).result(timeout=280)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with the sources of this clone, which sees no GPU and does not interpret kernels."""
    given = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    given |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'bench'}", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=given, capture_output=True, text=True, timeout=280, check=False
    )


def told(function: Callable[..., int], *given: Any) -> tuple[int, str]:
    """What it returns, and what it prints."""
    with redirect_stdout(StringIO()) as output:
        return function(*given), output.getvalue()


def logged(folder: Path, names: Sequence[str], arch: int) -> int:
    """The exit code of ``bench aot`` on small kernels."""
    with Log(folder / "aot.jsonl") as log:
        return aot.main([LAUNCHING[name] for name in names], [arch], log)


def findings(names: Sequence[str]) -> list[dict[str, Any]]:
    """Findings of ``bench aot`` about small kernels on sm_90."""
    rows = aot.compile_all([LAUNCHING[name] for name in names], [90])
    wanted = ("problems", "load_bits", "store_bits", "must_be_wide", "spill_bytes")
    return [{name: getattr(row, name) for name in wanted} for row in rows]


def test_aot_sees_spills_and_narrow_accesses_and_nothing_else(compiler: Run) -> None:
    names = ("wide", "narrow loads", "narrow stores", "spills", "single", "partial")
    wide, loads, stores, spills, single, partial = compiler(findings, names)
    assert wide["problems"] == single["problems"] == []
    assert wide["load_bits"] == wide["store_bits"] == {128: 2}
    assert single["load_bits"] == {}
    assert list(single["must_be_wide"]) == ["stores"]
    assert partial["problems"] == []
    assert list(partial["must_be_wide"]) == ["loads"]
    assert list(partial["store_bits"]) == [32]
    assert [p.split(":")[0] for p in loads["problems"]] == ["global loads narrower than 128 bits"]
    assert [p.split(":")[0] for p in stores["problems"]] == ["global stores narrower than 128 bits"]
    assert spills["spill_bytes"] > 0
    assert spills["problems"][0] == f"spills {spills['spill_bytes']} bytes per thread"


def products(arch: int) -> dict[str, set[str]]:
    """Matrix instructions of the attention of DiT-XL/2, by kernel."""
    found: dict[str, set[str]] = {}
    case = next(case for case in cases(("short_attention",)) if case.dtype == torch.bfloat16)
    for one in aot.record_launches(case, arch):
        ptx = launches.compiled_for(arch, *launches.specialise(one, arch)).asm["ptx"]
        found[one.kernel.__name__] = set(re.findall(r"wgmma.*?\.(m64n\d+)k|(mma\.sync|tcgen05\.mma)", ptx))
        found[one.kernel.__name__] = {shape or name for shape, name in found[one.kernel.__name__]}
    return found


@pytest.mark.parametrize(
    ("arch", "forward", "backward"),
    [
        pytest.param(80, "mma.sync", "mma.sync", marks=pytest.mark.nightly),
        (90, "m64n256", "m64n64"),
        pytest.param(100, "tcgen05.mma", "tcgen05.mma", marks=pytest.mark.nightly),
    ],
)
def test_attention_multiplies_by_the_widest_instructions(
    arch: int, forward: str, backward: str, compiler: Run
) -> None:  # fmt: skip
    found = compiler(products, arch)
    assert forward in found["_short_attention_fwd_kernel"]
    assert backward in found["_short_attention_bwd_kernel"]


def where_rows_are_turned() -> dict[str, tuple[list[str], list[str]]]:
    """By kernel, what the code in FP8 does with the address of its rows before and behind its barrier."""
    found = {}
    for case in cases(("fp8",)):
        if case.shape.startswith("DiT-XL-") and "norm" in case.shape and case.dtype == torch.bfloat16:
            recorded = aot.record_launches(case)[0]
            text = launches.compiled_for(90, *launches.specialise(recorded, 90)).asm["ttir"]
            before, behind = re.split(r"(?:ttg|gpu)\.barrier", text)
            found[case.shape] = tuple(re.findall(r"tt\.(addptr|splat) %rows_ptr", part) for part in (before, behind))
    return found


def test_rows_are_read_back_behind_a_barrier(compiler: Run) -> None:
    """Rows are written from a pointer to their start, and read by tiles."""
    found = compiler(where_rows_are_turned)
    assert len(found) == 3
    assert set(map(str, found.values())) == {str((["addptr"], ["splat"]))}


def test_a_kernel_that_no_processor_can_hold_is_a_problem() -> None:
    """Triton reports neither before the launch."""
    given: dict[str, Any] = {
        "case": cases(("philox",))[0],
        "kernel": "k",
        "registers": 4,
        "spill_bytes": 0,
        "load_bits": {},
    }
    given |= {"store_bits": {}, "must_be_wide": ()}
    assert aot.Compiled(**given, arch=100, shared_bytes=227 * 1024, tensor_columns=512).problems == []
    small = aot.Compiled(**given, arch=80, shared_bytes=163 * 1024 + 1)
    assert small.problems == ["wants 166913 bytes of shared memory, sm_80 has 166912"]
    large = aot.Compiled(**given, arch=100, shared_bytes=0, tensor_columns=720)
    assert large.problems == ["wants 720 columns of tensor memory, a processor has 512"]


def specialised() -> list[str]:
    """Types, aligned arguments and options of launches of a kernel."""

    def shown(x: torch.Tensor, count: int, factor: float, **options: Any) -> str:
        source, chosen = launches.specialise(Launch(square_kernel, (1,), (x, x, count, factor), options), 90)
        aligned = [path[0] for path, attribute in source.attrs.items() if attribute]
        return f"{' '.join(source.signature.values())} {aligned} {chosen['num_warps']} {chosen['arch']}"

    x = torch.empty(64)
    return [
        shown(x, 64, 1.0, BLOCK=16),
        shown(x[1:], 17, True, BLOCK=16, num_warps=8),
        shown(x.bfloat16(), 1, 2**40, BLOCK=16),
    ]


def test_aot_specialises_arguments_as_the_launcher_does(compiler: Run) -> None:
    assert compiler(specialised) == [
        "*fp32 *fp32 i32 fp32 constexpr [0, 1, 2] 4 sm90",
        "*fp32 *fp32 i32 u1 constexpr [] 8 sm90",
        "*bf16 *bf16 constexpr i64 constexpr [0, 1, 3] 4 sm90",
    ]


@pytest.mark.parametrize(
    ("ptx", "side", "widths"),
    [
        ("@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];", "loads", {128: 1}),
        ("ld.global.L1::evict_last.v8.b32 { %r1 }, [ %rd1 + 0 ];", "loads", {256: 1}),
        ("@!%p1 ld.global.L1::evict_first.L2::cache_hint.v2.b64 { %rd1 }, [ %rd1 ], %rd2;", "loads", {128: 1}),
        ("ld.global.nc.b16 \\t%rs1, [%rd1];\\n ld.global.b16 { %rs1 }, [ %rd1 ];", "loads", {16: 2}),
        ("ld.relaxed.gpu.global.f32 %f1, [%rd1]; ld.volatile.global.u8 %rs1, [%rd1];", "loads", {8: 1, 32: 1}),
        ("ld.param.b64 %rd1, [p]; ld.shared.v4.b32 {%r1}, [%r2]; ld.local.b32 %r1, [%r2];", "loads", {}),
        ("cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;", "loads", {128: 1}),
        ("@%p1 cp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 4;", "loads", {32: 1}),
        ("st.global.v4.b32 [ %rd1 + 0 ], { %r1 }; st.global.cs.b128 [%rd1], %rq1;", "stores", {128: 2}),
        ("st.shared.v4.b32 [%r1], {%r2}; @%p1 st.global.b32 [ %rd1 + 0 ], { %r1 };", "stores", {32: 1}),
    ],
)
def test_widths_are_read_from_ptx(ptx: str, side: Side, widths: dict[int, int]) -> None:
    assert access_widths(ptx, side) == widths


def compiled_in_turn(folder: Path) -> int:
    """Compile one case of each kernel, so that every dtype meets every GPU."""
    chosen: dict[tuple[int, torch.dtype], list[Case]] = {
        (arch, dtype): [] for arch in aot.ARCHITECTURES for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    for name in KERNELS:
        first = {case.dtype: case for case in reversed(cases((name,)))}
        able = [(arch, dtype) for arch, dtype in chosen if dtype in first and arch >= first[dtype].least_arch]
        arch, dtype = min(able, key=lambda pair: len(chosen[pair]))
        chosen[arch, dtype].append(first[dtype])
    with Log(folder / "aot.jsonl") as log:
        return max(aot.main(given, [arch], log) for (arch, _), given in chosen.items())


def test_every_kernel_compiles(compiler: Run, tmp_path: Path) -> None:
    """A case of each for one GPU, in turn; by night every case for all of them."""
    code, output = compiler(told, compiled_in_turn, tmp_path)
    assert code == 0, output[-5000:]
    found = record.read(tmp_path / "aot.jsonl")
    assert found.failures == ()
    assert {m.case.split()[0] for m in found.measurements} == set(KERNELS)
    for arch in (80, 90, 100):
        dtypes = {m.case.split()[2] for m in found.measurements if m.case.endswith(f" sm_{arch}")}
        assert dtypes == {"float32", "bfloat16", "float16"}
    assert {m.value for m in found.measurements if m.quantity == "spilled"} == {0}


@pytest.mark.nightly
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_compiles_without_spills_and_with_wide_accesses(name: str, tmp_path: Path) -> None:
    done = python("-m", "fastdiff_bench", "aot", name, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert done.stderr == ""
    found = record.read(tmp_path / "aot.jsonl")
    assert found.fingerprint.triton == launch.triton.__version__
    assert found.failures == ()
    rows = found.measurements
    assert {m.case.split()[0] for m in rows} == {name}
    least = min(case.least_arch for case in cases((name,)))
    for arch in (arch for arch in aot.ARCHITECTURES if arch >= least):
        assert {m.provider for m in rows if m.case.endswith(f" sm_{arch}")} == {m.provider for m in rows}
    resources, counts = {"registers", "spilled", "shared", "wide loads", "wide stores"}, set(COUNTS)
    assert {m.quantity for m in rows if m.case.endswith(" sm_90")} == resources | counts
    assert {m.value for m in rows if m.quantity == "spilled"} == {0}
    assert len({m.name for m in rows}) == len(rows)


def kept(folder: Path) -> int:
    """Compare the kernels of a DiT-XL/2 block in bf16, on sm_90, with the kept figures."""
    of_block = [case for case in cases(OF_DIT) if case.shape.startswith("DiT-XL") and case.dtype == torch.bfloat16]
    with Log(folder / "aot.jsonl") as log:
        return aot.main(of_block, [90], log, aot.read_baseline(KEPT, of_block, [90]))


def test_the_kernels_of_a_dit_block_are_not_worse_than_kept(compiler: Run, tmp_path: Path) -> None:
    """Registers, waves, instructions, special functions and least times; by night of every kernel."""
    if of_another_compiler():
        return
    code, output = compiler(told, kept, tmp_path)
    assert code == 0, output[-5000:]
    assert " 0 worse" in f" {output.splitlines()[-1]}"


@pytest.mark.nightly
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_is_not_worse_than_kept(name: str, tmp_path: Path) -> None:
    given = ("aot", name, "--arch", "90", "--out", str(tmp_path), "--baseline", str(KEPT))
    done = python("-m", "fastdiff_bench", *given)
    assert of_another_compiler() or done.returncode == 0, done.stdout[-5000:]


def of_another_compiler() -> bool:
    """Whether the newest kept figures are of another version of Triton, which writes other code."""
    newest = max(record.read_all([KEPT]), key=lambda one: one.fingerprint.date)
    return bool(newest.fingerprint.triton != launch.triton.__version__)


def test_a_spill_is_a_failure_in_the_record_and_of_the_run(compiler: Run, tmp_path: Path) -> None:
    code, output = compiler(told, logged, tmp_path, ["spills"], 90)
    assert code == 1
    assert "PROBLEM greedy_kernel sm_90 (philox spills float32): spills" in output
    found = record.read(tmp_path / "aot.jsonl")
    assert [f.provider for f in found.failures][:1] == ["greedy_kernel"]
    spilled = next(m for m in found.measurements if m.quantity == "spilled")
    assert found.failures[0].reason == f"spills {spilled.value:.0f} bytes per thread"


def test_the_smallest_run_is_one_kernel_and_compares_with_itself(compiler: Run, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    smallest = ["aot", "--smoke", "--out"]
    assert compiler(told, main, [*smallest, str(first)])[0] == 0
    code, output = compiler(told, main, [*smallest, str(second), "--baseline", str(first)])
    assert code == 0, output
    assert f"against {first / 'aot.jsonl'}" in output
    assert "0 worse, 0 better, 11 compared" in output
    before, after = (record.read(folder / "aot.jsonl").measurements for folder in (first, second))
    assert before == after
    assert {m.case for m in after} == {f"{cases(('philox',))[0]} sm_80"}


def row(kernel: str, quantity: str, value: float, better: record.Better = "lower", arch: int = 90) -> Measurement:
    return Measurement(
        bench="aot", case=f"philox wide float32 sm_{arch}", provider=kernel, quantity=quantity, unit="1", value=value,
        better=better,
    )  # fmt: skip


def compared(folder: Path, before: Sequence[Measurement], now: Sequence[Measurement]) -> tuple[list[str], bool]:
    with Log(folder / "aot.jsonl") as log:
        for measurement in before:
            log.write(measurement)
    text, worse = aot.read_baseline(folder, [LAUNCHING["wide"]], [90]).compare(now)
    return [" ".join(line.split()) for line in text.splitlines()[1:]], worse


def test_more_registers_or_less_wide_accesses_are_worse(tmp_path: Path) -> None:
    before = [row("k", "registers", 32), row("k", "wide loads", 1.0, "higher")]
    now = [row("k", "registers", 40), row("k", "wide loads", 0.5, "higher")]
    lines, worse = compared(tmp_path, before, now)
    assert worse
    assert lines == [
        "kernel case quantity before now",
        "k philox wide float32 sm_90 registers 32 40 worse",
        "k philox wide float32 sm_90 wide loads 1 0.5 worse",
        "2 worse, 0 better, 2 compared",
    ]


def test_better_new_and_missing_kernels_are_named_and_are_no_regression(tmp_path: Path) -> None:
    before = [row("k", "registers", 40), row("old", "registers", 8), row("elsewhere", "registers", 8, arch=80)]
    lines, worse = compared(tmp_path, before, [row("k", "registers", 32), row("young", "registers", 255)])
    assert not worse
    assert lines[1:] == [
        "k philox wide float32 sm_90 registers 40 32 better",
        "new: young (philox wide float32 sm_90)",
        "gone: old (philox wide float32 sm_90)",
        "0 worse, 1 better, 1 compared",
    ]


def test_a_baseline_without_these_kernels_is_refused(tmp_path: Path) -> None:
    with Log(tmp_path / "op.jsonl") as log:
        log.write(replace(row("k", "registers", 1), bench="op"))
    with pytest.raises(BenchError, match="no record of `fastdiff bench aot`"):
        aot.read_baseline(tmp_path, [LAUNCHING["wide"]], [90])
    with Log(tmp_path / "aot.jsonl") as log:
        log.write(row("k", "registers", 1))
    with pytest.raises(BenchError, match="none of the cases that are counted now"):
        aot.read_baseline(tmp_path, [LAUNCHING["wide"]], [100])
