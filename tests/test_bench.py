"""The benchmarks: what they compile is what a GPU would launch, faults are seen, and only what is right is timed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import BenchError, op, record, timing
from bench.__main__ import main
from bench.assembly import Side, access_widths
from bench.cases import KERNELS, OPS, cases
from bench.table import table
from bench.timing import Effort, Stopwatch, Timing
from fastdiff_kernels import launch
from tests.bench_kernels import square_reference, squaring

ROOT = Path(__file__).parent.parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNEL = "triton (interpreter)" if DEVICE == "cpu" else "triton"


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python with the sources of this clone, which sees no GPU and does not interpret kernels."""
    given = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    given |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "CUDA_VISIBLE_DEVICES": ""} | environment
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=given, capture_output=True, text=True, timeout=280, check=False
    )


def compiled(*names: str) -> list[dict[str, Any]]:
    """What ``bench aot`` finds out about small kernels on sm_90."""
    code = f"""
import json
from dataclasses import asdict
from bench.aot import compile_all
from tests.bench_kernels import LAUNCHING
rows = compile_all([LAUNCHING[name] for name in {names!r}], [90])
print(json.dumps([asdict(row) | {{"problems": row.problems}} for row in rows]))
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def test_aot_sees_spills_and_narrow_accesses_and_nothing_else() -> None:
    names = ("wide", "narrow loads", "narrow stores", "spills", "single", "partial")
    wide, loads, stores, spills, single, partial = compiled(*names)
    assert wide["problems"] == single["problems"] == []
    assert wide["load_bits"] == wide["store_bits"] == {"128": 2}
    assert single["load_bits"] == {}
    assert single["must_be_wide"] == ["stores"]
    assert partial["problems"] == []
    assert partial["must_be_wide"] == ["loads"]
    assert list(partial["store_bits"]) == ["32"]
    assert [p.split(":")[0] for p in loads["problems"]] == ["global loads narrower than 128 bits"]
    assert [p.split(":")[0] for p in stores["problems"]] == ["global stores narrower than 128 bits"]
    assert spills["spill_bytes"] > 0
    assert spills["problems"][0] == f"spills {spills['spill_bytes']} bytes per thread"


def test_aot_specialises_arguments_as_the_launcher_does() -> None:
    code = """
import torch
from bench.aot import specialise
from fastdiff_kernels.launch import Launch
from tests.bench_kernels import square_kernel
def show(x, count, factor, **options):
    source, chosen = specialise(Launch(square_kernel, (1,), (x, x, count, factor), options), 90)
    aligned = [path[0] for path, attribute in source.attrs.items() if attribute]
    print(*source.signature.values(), aligned, chosen["num_warps"], chosen["arch"])
x = torch.empty(64)
show(x, 64, 1.0, BLOCK=16)
show(x[1:], 17, True, BLOCK=16, num_warps=8)
show(x.bfloat16(), 1, 2**40, BLOCK=16)
"""
    done = python("-c", code)
    assert done.stdout.splitlines() == [
        "*fp32 *fp32 i32 fp32 constexpr [0, 1, 2] 4 sm90",
        "*fp32 *fp32 i32 u1 constexpr [] 8 sm90",
        "*bf16 *bf16 constexpr i64 constexpr [0, 1, 3] 4 sm90",
    ], done.stderr


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


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_compiles_without_spills_and_with_wide_accesses(name: str, tmp_path: Path) -> None:
    file = tmp_path / "aot.jsonl"
    done = python("-m", "bench", "aot", name, "--json", str(file))
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert done.stderr == ""
    fingerprint, *rows = (json.loads(line) for line in file.read_text().splitlines())
    assert fingerprint["fingerprint"]["triton"] == launch.triton.__version__
    assert {row["case"].split()[0] for row in rows} == {name}
    for arch in (80, 90, 100):
        assert {row["kernel"] for row in rows if row["arch"] == arch} == {row["kernel"] for row in rows}
    assert all(row["spill_bytes"] == 0 and row["problems"] == [] for row in rows)


@pytest.mark.parametrize(
    ("arguments", "interpreted", "message"),
    [
        (["aot", "philox"], True, "TRITON_INTERPRET is set: .*unset it"),
        (["op", "philox"], True, "TRITON_INTERPRET is set: .*unset it"),
        (["op", "philox"], False, "there is no CUDA device to measure on; use --device cpu"),
        (["op", "softmax"], False, "op 'softmax': expected some of philox, noising"),
        (["aot", "attention"], False, "op 'attention': expected some of philox, .*, adamw8bit$"),
        (["op", "philox", "--dtype", "bf16"], False, "no case of philox has dtype bf16"),
    ],
)
def test_what_cannot_be_measured_here_is_one_message_and_exit_code_2(
    arguments: list[str],
    interpreted: bool,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", interpreted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of a size for a test."""
    monkeypatch.setattr(timing, "_FLUSHED_BYTES", {DEVICE: 2**20})
    monkeypatch.setattr(timing, "_COPIED_BYTES", {DEVICE: 2**20})


@pytest.mark.usefixtures("quick")
def test_only_what_is_right_is_timed_and_each_failure_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(inputs: Any) -> Callable[[], Any]:
        import fastdiff_of_another_world  # type: ignore[import-not-found]  # noqa: F401

        raise AssertionError("unreachable")

    def refusing(inputs: Any) -> Callable[[], Any]:
        raise ValueError("groups of 7\nand more")

    rivals = {
        "double": lambda inputs: lambda: inputs["x"] * inputs["x"],
        "wrong": lambda inputs: lambda: inputs["x"] * inputs["x"].bfloat16(),
        "elsewhere": lambda inputs: lambda: (square_reference(inputs["x"].detach()), ())[1],
        "missing": missing,
        "refusing": refusing,
    }
    file = tmp_path / "op.jsonl"
    assert op.main([squaring(rivals)], DEVICE, file, quick=True) == 0
    fingerprint, copy, *rows = (json.loads(line) for line in file.read_text().splitlines())
    assert fingerprint["fingerprint"]["torch"] == torch.__version__
    assert copy["copy_gb_per_s"] > 0
    results = {(r["provider"], r["direction"]): r for r in rows if "median_us" in r}
    right = {"eager", "compile", KERNEL, "double"}
    assert set(results) == {(name, d) for name in right for d in ("forward", "backward")} | {("elsewhere", "forward")}
    for (name, direction), row in results.items():
        assert 0 < row["p20_us"] <= row["median_us"] <= row["p80_us"]
        assert row["repetitions"] == 3
        assert row["bytes"] == {"forward": 8000, "backward": 12000}[direction]
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["median_us"] / 1e3)
        assert row["of_copy"] == pytest.approx(row["gb_per_s"] / copy["copy_gb_per_s"])
        if name != "elsewhere":
            compiled = results["compile", direction]["median_us"]
            assert row["over_compile"] == pytest.approx(compiled / row["median_us"])
        assert row["default"] == ("eager" if DEVICE == "cpu" else "triton")
    failures = {r["provider"]: r for r in rows if "reason" in r}
    assert failures["wrong"]["reason"].startswith("wrong: out0: ")
    assert failures["missing"]["reason"] == "not installed: No module named 'fastdiff_of_another_world'"
    assert failures["refusing"]["reason"] == "ValueError: groups of 7"
    printed = capsys.readouterr().out
    assert re.search(r"^philox square float32 +refusing +not timed: ValueError: groups of 7$", printed, re.MULTILINE)
    assert printed.count(" backward ") == len(right)


@pytest.mark.usefixtures("quick")
def test_a_wrong_kernel_is_not_timed_and_fails_the_run(tmp_path: Path) -> None:
    file = tmp_path / "op.jsonl"
    assert op.main([squaring(factor=1.0001)], DEVICE, file, quick=True) == 1
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [r["provider"] for r in rows if "reason" in r] == [KERNEL]
    assert {r["provider"] for r in rows if "median_us" in r} == {"eager", "compile"}


@pytest.mark.usefixtures("quick")
def test_a_case_that_cannot_be_checked_does_not_end_the_run(tmp_path: Path) -> None:
    def broken(inputs: Any, backend: str) -> torch.Tensor:
        raise RuntimeError("out of memory")

    case = squaring()
    file = tmp_path / "op.jsonl"
    assert op.main([replace(case, call=broken), case], DEVICE, file, quick=True) == 1
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["provider"], r["reason"]) for r in rows if "reason" in r] == [("every", "RuntimeError: out of memory")]
    assert any("median_us" in r for r in rows)


@pytest.mark.usefixtures("quick")
def test_torch_compile_is_timed_even_if_it_is_less_accurate_because_the_rest_is_compared_with_it(
    tmp_path: Path,
) -> None:
    def less_accurate(inputs: Any, backend: str) -> torch.Tensor:
        square = square_reference(inputs["x"])
        return square * (1 + 2**-20) if backend == "compile" else square

    file = tmp_path / "op.jsonl"
    assert op.main([replace(squaring(), call=less_accurate)], DEVICE, file, quick=True) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["provider"], r["timed"]) for r in rows if "reason" in r] == [("compile", True)]
    assert "compile" in {r["provider"] for r in rows if "median_us" in r}


def test_attention_has_backends_of_its_own_and_what_is_refused_is_named(tmp_path: Path) -> None:
    file = tmp_path / "op.jsonl"
    case = next(case for case in cases(("attention",)) if "x72-" in case.shape)
    assert op.main([case], "cpu", file, quick=True) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    timed = {(r["provider"], r["direction"]) for r in rows if "median_us" in r}
    assert timed == {(name, d) for name in ("auto", "sdpa", "eager") for d in ("forward", "backward")}
    assert {r["default"] for r in rows if "median_us" in r} == {"auto"}
    refused = {r["provider"]: r["reason"] for r in rows if "reason" in r}
    assert refused.keys() == {"cudnn", "flash", "xformers"}
    assert all("needs a CUDA device" in reason for reason in refused.values())


@pytest.mark.usefixtures("quick")
def test_calls_take_turns_until_each_ran_long_enough() -> None:
    calls: list[str] = []

    def call(name: str, seconds: float) -> Callable[[], None]:
        return lambda: (calls.append(name), time.sleep(seconds))[1]

    watch = Stopwatch("cpu", Effort(repetitions=3, seconds=0.05, limit_seconds=60, warm_up_seconds=0))
    timings = watch.measure({"slow": call("slow", 0.01), "fast": call("fast", 0.005)})
    assert calls == ["slow", "fast"] * (len(calls) // 2)
    assert timings["slow"].repetitions == timings["fast"].repetitions == len(calls) // 2 - 1  # one round warms up
    assert 6 <= timings["fast"].repetitions <= 12
    assert timings["slow"].median >= 0.01 > timings["fast"].p20 >= 0.005


@pytest.mark.usefixtures("quick")
def test_the_limit_ends_the_repetitions_but_not_before_the_least_number() -> None:
    watch = Stopwatch("cpu", Effort(repetitions=20, seconds=1e9, limit_seconds=0, warm_up_seconds=0))
    assert watch.measure({"nothing": lambda: None})["nothing"].repetitions == 20


def test_a_timing_is_the_median_and_the_outer_fifths() -> None:
    assert Timing.of([float(n) for n in range(11)]) == Timing(5.0, 2.0, 8.0, 11)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BenchError, match="no CUDA device to measure on; use --device cpu"):
        Stopwatch("cuda", timing.QUICK)


def test_the_verdict_names_the_cases_where_the_kernel_loses() -> None:
    def result(shape: str, provider: str, direction: str, microseconds: float) -> op.Result:
        times = (microseconds,) * 3
        return op.Result("loss", shape, "bfloat16", provider, direction, *times, 20, 1, 1.0, 1.0, None, "triton")

    won = [result("a", "triton", "forward", 3), result("a", "triton", "backward", 1)]
    won += [result("a", "compile", "forward", 2), result("a", "compile", "backward", 4)]
    lost = [result("b", "triton", "forward", 4), result("b", "compile", "forward", 3)]
    assert "as fast as torch.compile or faster in all 1 cases" in op._verdict(won)
    assert op._verdict(won + lost).splitlines()[1:] == [
        "The kernel loses to torch.compile in 1 of 2 cases; it should not be the default for:",
        "  loss b bfloat16: 0.75x",
    ]
    assert "No case has both" in op._verdict(lost[:1])


def test_bytes_of_an_op_are_what_enters_and_leaves_unless_the_case_knows_better() -> None:
    x, out, gradient = torch.empty(10), torch.empty(20), torch.empty(10)
    case = squaring()
    assert op._least_bytes(case, {"x": x, "groups": 4}, [out], [gradient]) == {"forward": 120, "backward": 160}


def test_upstream_gradients_do_not_depend_on_strides_or_dtype() -> None:
    output = torch.empty(2, 3, 4, 5)
    by_channel, exact = output.to(memory_format=torch.channels_last), output.double()
    plain, strided, double = (op._upstream([tensor])[0] for tensor in (output, by_channel, exact))
    assert strided.stride() == by_channel.stride()
    assert torch.equal(plain, strided)
    assert torch.equal(plain.double(), double)


def test_every_case_has_inputs_and_a_name_of_its_own() -> None:
    every = cases()
    assert len({str(case) for case in every}) == len(every)
    assert {case.op for case in every} == set(OPS)


def test_a_table_has_aligned_columns() -> None:
    assert table([("name", "n"), ("a", "10")], "<>") == "name   n\na     10"


def test_the_fingerprint_names_the_commit_and_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/somewhere/python", "-m", "bench", "op"])
    fingerprint = record.Fingerprint.here()
    assert fingerprint.command == "python -m bench op"
    assert re.fullmatch(r"unknown|[0-9a-f]{12}(-dirty)?", fingerprint.git)


def gpu_script(folder: Path, python3: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``bench/gpu.sh`` with these commands in place of Python's."""
    for name, text in (("python3", python3), ("nvidia-smi", "echo 550 W")):
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    given = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    command = ["bash", "bench/gpu.sh", *arguments]
    return subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=60, check=False)


def test_the_gpu_script_goes_on_after_a_failure_and_ends_with_its_code(tmp_path: Path) -> None:
    fake = """
case "$*" in
    -) cat >/dev/null; echo nvidia-h200 ;;
    *Fingerprint*) echo "device NVIDIA H200" ;;
    *tests/ops) echo "one test failed"; exit 3 ;;
    *) echo "ran $*" ;;
esac"""
    done = gpu_script(tmp_path, fake, str(tmp_path / "out"))
    assert done.returncode == 3, done.stderr
    out = tmp_path / "out"
    assert sorted(p.name for p in out.iterdir()) == [
        "bench.log",
        "environment.txt",
        "gpu.log",
        "ops.log",
        "summary.txt",
    ]
    summary = (out / "summary.txt").read_text().splitlines()
    assert [re.sub(r", \d+ s$", "", line) for line in summary] == ["ops: failed (3)", "gpu: passed", "bench: passed"]
    assert (out / "environment.txt").read_text() == "device NVIDIA H200\n550 W\n"
    assert (out / "bench.log").read_text() == f"ran -m bench op --json {out}/bench.jsonl\n"
    assert gpu_script(tmp_path, fake, str(tmp_path / "out"), "gpu").returncode == 0
    assert "ops" not in (out / "summary.txt").read_text()


def test_the_gpu_script_refuses_a_machine_without_one(tmp_path: Path) -> None:
    given = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", "bench/gpu.sh", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr == "bench/gpu.sh: torch sees no CUDA device; run this on a machine with a GPU\n"
    assert not (tmp_path / "out").exists()
