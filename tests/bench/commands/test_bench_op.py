"""``bench op``: it times correct kernels only, names every failure and records the figures."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastdiff_bench.__main__ import main
from fastdiff_bench.cases import cases
from fastdiff_bench.cases.case import Case, differentiable
from fastdiff_bench.commands import op
from fastdiff_bench.correctness import accuracy, check
from fastdiff_bench.measure import roofline as limits
from fastdiff_bench.measure import timing
from fastdiff_bench.measure.timing import Timing
from fastdiff_bench.records import record
from fastdiff_bench.records.record import Log, Measurement, Record
from fastdiff_kernels import launch
from tests.support.benches.bench_kernels import square_reference, squaring

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNEL = "triton (interpreter)" if DEVICE == "cpu" else "triton"
DIRECTIONS = ("forward", "backward")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of a size for a test."""
    monkeypatch.setattr(timing, "_FLUSHED_BYTES", {DEVICE: 2**20})
    monkeypatch.setattr(limits, "_COPIED_BYTES", {DEVICE: 2**20})
    monkeypatch.setattr(limits, "_SIDE", {DEVICE: 64})


def timed(folder: Path, *given: Case, code: int = 0) -> Record:
    """The record of ``bench op --smoke`` for these cases."""
    with Log(folder / "op.jsonl") as log:
        assert op.main(given, DEVICE, log, smoke=True) == code
    return record.read(log.path)


def by_name(found: Record) -> dict[tuple[str, str, str], Measurement]:
    """Measurements of the only case by provider, direction and quantity."""
    rows = {(m.provider, str(m.facts.get("direction")), m.quantity): m for m in found.measurements}
    assert len(rows) == len(found.measurements)
    return rows


def reasons(found: Record) -> dict[str, str]:
    return {failure.provider: failure.reason for failure in found.failures}


def test_only_what_is_right_is_timed_and_each_failure_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(inputs: Any) -> Callable[[], Any]:
        import fastdiff_of_another_world  # type: ignore[import-not-found]  # noqa: F401

        raise AssertionError("unreachable")

    def refusing(inputs: Any) -> Callable[[], Any]:
        raise ValueError("groups of 7\nand more")

    other_libraries = {
        "double": lambda inputs: lambda: inputs["x"] * inputs["x"],
        "wrong": lambda inputs: lambda: inputs["x"] * inputs["x"].bfloat16(),
        "elsewhere": lambda inputs: lambda: (square_reference(inputs["x"].detach()), ())[1],
        "missing": missing,
        "refusing": refusing,
    }
    found = timed(tmp_path, squaring(other_libraries))
    right = {"eager", "compile", KERNEL, "double"}
    rows = {name: row for name, row in by_name(found).items() if row.case != "limits"}
    assert {name[:2] for name in rows} == {(n, d) for n in right for d in DIRECTIONS} | {("elsewhere", "forward")}
    assert reasons(found)["wrong"].startswith("wrong: out0: ")
    assert reasons(found)["missing"] == "not installed: No module named 'fastdiff_of_another_world'"
    assert reasons(found)["refusing"] == "ValueError: groups of 7"
    assert {failure.case for failure in found.failures} == {"philox square float32"}
    printed = capsys.readouterr().out
    assert re.search(r"^philox square float32 +refusing +ValueError: groups of 7$", printed, re.MULTILINE)
    assert printed.count(" backward ") == len(right)


def test_times_are_set_against_the_least_bytes_and_operations_and_the_limits(tmp_path: Path) -> None:
    rows = by_name(timed(tmp_path, squaring()))
    copy = rows["torch", "None", "copy bandwidth"].value
    matmul = rows["torch", "None", "matmul rate fp32"].value
    for provider in ("eager", "compile", KERNEL):
        for direction, size, operations in (("forward", 8000, 1000), ("backward", 12000, 2000)):
            own = {quantity: row for (p, d, quantity), row in rows.items() if (p, d) == (provider, direction)}
            assert {row.case for row in own.values()} == {f"philox square float32 {direction}"}
            seconds = own["time"].value * 1e-6
            assert 0 < (own["time"].p20 or 0) <= own["time"].value <= (own["time"].p80 or 0)
            assert own["bandwidth"].value == pytest.approx(size / seconds / 1e9)
            assert (own["bandwidth"].p80 or 0) * (own["time"].p20 or 0) == pytest.approx(size / 1e3)
            assert own["of copy"].value == pytest.approx(own["bandwidth"].value / copy)
            assert own["rate"].value == pytest.approx(operations / seconds / 1e12)
            assert own["of matmul"].value == pytest.approx(own["rate"].value / matmul)
            assert {q: row.better for q, row in own.items() if row.better == "lower"} == {"time": "lower"}
            assert {row.n for row in own.values()} == {3}
            assert own["time"].facts == {
                "op": "philox", "shape": "square", "dtype": "float32", "direction": direction, "bytes": size,
                "operations": operations, "arithmetic": "fp32", "default": "eager" if DEVICE == "cpu" else "triton",
                "launch bound": own["time"].facts["launch bound"],
            }  # fmt: skip
            if provider != "compile":
                compiled = rows["compile", direction, "time"].value
                assert own["over compile"].value == pytest.approx(compiled / own["time"].value)


def test_a_wrong_kernel_is_not_timed_and_fails_the_run(tmp_path: Path) -> None:
    found = timed(tmp_path, squaring(factor=1.0001), code=1)
    assert reasons(found).keys() == {KERNEL}
    assert {m.provider for m in found.measurements} == {"torch", "eager", "compile"}


@pytest.mark.parametrize(("backend", "code"), [("auto", 1), ("sdpa", 0)])
def test_a_wrong_default_fails_the_run_and_another_backend_does_not(tmp_path: Path, backend: str, code: int) -> None:
    def call(inputs: Any, chosen: str) -> torch.Tensor:
        return square_reference(inputs["x"]) * (1.001 if chosen == backend else 1)

    found = timed(tmp_path, replace(squaring(), backends=("auto", "sdpa", "reference"), call=call), code=code)
    assert reasons(found).keys() == {backend}


def test_wrong_results_are_refused_without_assertions_too() -> None:
    """``python -O`` drops them."""
    names: dict[str, Any] = {}
    exec(compile(Path(accuracy.__file__).read_text(), accuracy.__file__, "exec", optimize=1), names)
    exact = torch.ones(10, dtype=torch.float64)
    right, wrong = exact.float(), torch.full((10,), 1.001)
    names["assert_no_worse"]({"out0": right}, {"out0": right}, {"out0": exact})
    for value in (wrong, right.half(), right[:9], right / 0):
        with pytest.raises(AssertionError, match=r"out0|not finite"):
            names["assert_no_worse"]({"out0": value}, {"out0": right}, {"out0": exact})
    with pytest.raises(AssertionError, match="gives out0, eager out0, dx"):
        names["assert_no_worse"]({"out0": right}, {"out0": right, "dx": right}, {"out0": exact})


def test_optimizers_of_others_get_gradients_only_of_their_dtype() -> None:
    compared = [case for case in cases(("adamw8bit",)) if case.other_libraries]
    assert compared
    for case in compared:
        inputs = case.build("cpu")
        assert inputs["grad"].dtype == inputs["param"].dtype


@pytest.mark.parametrize("sums", [(), ("out0",)])
def test_sums_are_compared_in_rms_alone(sums: tuple[str, ...]) -> None:
    """One of many errors is three times the largest of eager, which hardly changes their RMS."""

    def off_in_one_place(inputs: Any) -> Callable[[], Any]:
        x = inputs["x"].detach()
        error = torch.zeros_like(x)
        error.view(-1)[0] = 3 * (x * x - x.double() ** 2).abs().max()
        return lambda: inputs["x"] * inputs["x"] + error

    case = replace(squaring({"off": off_in_one_place}), sums=sums)
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    passed, failures = check.run_checks(case, lambda: {"x": x.clone().requires_grad_()}, check.providers(case, DEVICE))
    assert ("off" in passed, "off" in failures) == (bool(sums), not sums)


def test_sums_are_gradients_of_their_cases() -> None:
    for case in cases(("adaln", "bias_gradient", "geglu", "gelu", "group_norm", "rotary", "swiglu")):
        assert case.sums
        assert set(case.sums) <= {f"d{name}" for name in differentiable(case.build("meta"))}


@pytest.mark.nightly
def test_a_case_that_cannot_be_checked_does_not_end_the_run(tmp_path: Path) -> None:
    def broken(inputs: Any, backend: str) -> torch.Tensor:
        raise RuntimeError("out of memory")

    case = squaring()
    found = timed(tmp_path, replace(case, call=broken), case, code=1)
    assert reasons(found) == {"every": "RuntimeError: out of memory"}
    assert "eager" in {m.provider for m in found.measurements}


def test_torch_compile_is_timed_even_if_it_is_less_accurate(
    tmp_path: Path,
) -> None:
    def less_accurate(inputs: Any, backend: str) -> torch.Tensor:
        square = square_reference(inputs["x"])
        return square * (1 + 2**-20) if backend == "compile" else square

    found = timed(tmp_path, replace(squaring(), call=less_accurate))
    assert reasons(found)["compile"].startswith("wrong: out0: ")
    assert "timed nevertheless" in reasons(found)["compile"]
    assert "compile" in {m.provider for m in found.measurements}


@pytest.mark.nightly
def test_the_smallest_run_of_the_command_times_attention_by_every_backend_that_can_run(tmp_path: Path) -> None:
    assert main(["op", "attention", "--smoke", "--device", "cpu", "--out", str(tmp_path)]) == 0
    found = record.read(tmp_path / "op.jsonl")
    assert found.fingerprint.torch == torch.__version__
    first = str(cases(("attention",))[0])
    timings = {(m.provider, m.case) for m in found.measurements if m.quantity == "time"}
    assert timings == {(name, f"{first} {d}") for name in ("auto", "sdpa", "eager") for d in DIRECTIONS}
    assert {m.facts["default"] for m in found.measurements if m.quantity == "time"} == {"auto"}
    assert {m.facts["arithmetic"] for m in found.measurements if m.quantity == "of matmul"} == {"bf16"}
    assert reasons(found).keys() == {"cudnn", "flash", "xformers"}
    assert all("needs a CUDA device" in reason for reason in reasons(found).values())


def test_interpreted_kernels_are_not_taken_for_those_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main(["op", "philox", "--out", str(tmp_path / "out")]) == 2
    assert re.search(r"TRITON_INTERPRET is set: .*unset it$", capsys.readouterr().err.splitlines()[-1])
    assert not (tmp_path / "out").exists()


def test_the_verdict_names_the_cases_where_the_kernel_loses() -> None:
    def result(shape: str, provider: str, direction: str, seconds: float) -> op.Result:
        case = replace(squaring(), shape=shape)
        return op.Result(
            case=case, provider=provider, direction=direction, time=Timing(seconds, seconds, seconds, 20), bytes=1,
            operations=None, compiled=None, default="triton",
        )  # fmt: skip

    won = [result("a", "triton", "forward", 3), result("a", "triton", "backward", 1)]
    won += [result("a", "compile", "forward", 2), result("a", "compile", "backward", 4)]
    lost = [result("b", "triton", "forward", 4), result("b", "compile", "forward", 3)]
    assert "as fast as torch.compile or faster in all 1 cases" in op._verdict(won)
    assert op._verdict(won + lost).splitlines() == [
        "The kernel loses to torch.compile in 1 of 2 cases; it should not be the default for:",
        "  philox b float32: 0.75x",
    ]
    assert "No case has both" in op._verdict(lost[:1])


def test_upstream_gradients_do_not_depend_on_strides_or_dtype() -> None:
    output = torch.empty(2, 3, 4, 5)
    by_channel, exact = output.to(memory_format=torch.channels_last), output.double()
    plain, strided, double = (check.upstream_of([tensor])[0] for tensor in (output, by_channel, exact))
    assert strided.stride() == by_channel.stride()
    assert torch.equal(plain, strided)
    assert torch.equal(plain.double(), double)


def test_a_pattern_chooses_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = cases(("adaln",))
    assert {case.shape for case in op._named(given, "XL-gated.*(bfloat16|float32)")} == {"DiT-XL-gated-256x1152"}
    assert op._named(given, None) == given
    for pattern, reason in (("XXL", "--case XXL: in no name of the 35 cases"), ("(", "--case (: missing )")):
        assert main(["op", "adaln", "--case", pattern, "--out", str(tmp_path)]) == 2
        assert reason in capsys.readouterr().err


def test_limits_are_measured_once_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of another machine, of a smoke run or of yesterday says nothing about now."""
    with Log(tmp_path / "op.jsonl") as log:
        measured = limits.measure(DEVICE, timing.QUICK)
        log.write(*measured.measurements("op"))

    def again(*_: object) -> limits.Limits:
        raise LookupError("measured again")

    monkeypatch.setattr(limits, "measure", again)
    found = limits.kept(tmp_path, DEVICE, timing.QUICK, smoke=False)
    assert found.copy_bytes_per_s == pytest.approx(measured.copy_bytes_per_s)
    assert found.matmul_flops_per_s == pytest.approx(measured.matmul_flops_per_s)
    with pytest.raises(LookupError):
        limits.kept(tmp_path, DEVICE, timing.QUICK, smoke=True)
    (tmp_path / "op.jsonl").write_text(re.sub('"date": "2', '"date": "1', (tmp_path / "op.jsonl").read_text()))
    with pytest.raises(LookupError):
        limits.kept(tmp_path, DEVICE, timing.QUICK, smoke=False)
