"""adaLN whose output, or gradient of the branch, is an operand of FP8 products: numbers, sums, forms and strides."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdiff_bench.correctness.accuracy import poisoned_memory
from fastdiff_kernels.adaln.plan import backward_plan, forward_plan, gate_plan
from fastdiff_kernels.fp8 import adaln as ops
from fastdiff_kernels.fp8.adaln import gate_backward, gated_norm, gated_norm_backward, norm
from fastdiff_kernels.fp8.values import Form, Quantised, quantise
from fastdiff_kernels.names import Backend

EPS = 1e-6
FORMS = (Form(rows=True, columns=True), Form(rows=True, plain=True), Form(plain=True), Form(columns=True))
ALL = Form(rows=True, columns=True, plain=True)
SHAPES = ((1, 1, 1), (2, 37, 40), (3, 64, 384))
"""One row, no multiple of a tile, and whole tiles."""


def drawn(shape: tuple[int, int, int], device: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """All that the ops take; modulations as parts of that of a block, with its strides."""
    generator, (batch, _, width) = torch.Generator().manual_seed(0), shape

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    packed = normal(batch, 6 * width)
    given = {name: normal(*shape) for name in ("x", "branch", "dy", "dh")} | {"bias": normal(width)}
    given |= {"first": packed[:, : 2 * width], "rest": packed[:, 2 * width :], "later": normal(batch, 4 * width)}
    return given | {"unit": torch.tensor(2.0**-6, device=device)}  # 448 of it is 7: some values are larger


def results(given: dict[str, Tensor], form: Form, backend: Backend) -> dict[str, tuple[Quantised, list[Tensor]]]:
    """The operand of each op, and what else it returns; the backward passes take the statistics of torch."""
    x, branch, bias, rest, unit = (given[name] for name in ("x", "branch", "bias", "rest", "unit"))
    first = norm(x, given["first"], EPS, unit, form, backend=backend)
    second = gated_norm(x, branch, bias, rest, EPS, unit, form, backend=backend)
    of_torch = gated_norm(x, branch, bias, rest, EPS, unit, form, backend="reference")
    gated = gated_norm_backward(
        given["later"], given["dy"], given["dh"], x, branch, bias, rest, of_torch.mean, of_torch.rstd, unit, form,
        backend=backend,
    )  # fmt: skip
    gate = gate_backward(given["dh"], branch, bias, rest, unit, form, backend=backend)
    assert gated.dx is not None
    assert gate.dx is None
    return {
        "norm": (first.y, [first.mean, first.rstd, first.h]),
        "gated norm": (second.y, [second.mean, second.rstd, second.h]),
        "gated norm backward": (gated.dbranch, [gated.dbias, gated.dmodulation, gated.dx]),
        "gate backward": (gate.dbranch, [gate.dbias, gate.dmodulation]),
    }


@pytest.mark.parametrize(("shape", "form"), [*product(SHAPES, FORMS)], ids=str)
def test_operands_are_what_torch_makes_of_the_values(device: str, shape: tuple[int, int, int], form: Form) -> None:
    """In fp32, the plain form holds the values before rounding: its bytes follow from it, and it from torch."""
    given = drawn(shape, device)
    with poisoned_memory():
        every, kernel = results(given, ALL, "triton"), results(given, form, "triton")
    plain = results(given, ALL, "reference")
    for op, (ours, others) in kernel.items():
        full, _ = every[op]
        assert full.plain is not None
        wanted = quantise(full.plain, given["unit"], form, torch.float32)
        for found, right in zip(ours[:3], wanted[:3], strict=True):
            assert (found is None) == (right is None), op
            assert found is None or right is None or torch.equal(found.view(torch.uint8), right.view(torch.uint8)), op
            assert found is None or found.is_contiguous()
        assert ours.maxima.amax() == wanted.maxima.amax(), op
        torch.testing.assert_close(full.plain, plain[op][0].plain, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(others, plain[op][1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_of_16_bits_are_those_of_torch(device: str, dtype: torch.dtype) -> None:
    """But for some at the edge of rounding, which are neighbours."""
    given = drawn((2, 64, 96), device, dtype)
    kernel, plain = (results(given, FORMS[0], backend) for backend in ("triton", "reference"))
    for op, (ours, others) in kernel.items():
        of_torch, others_of_torch = plain[op]
        for found, right in zip(ours[:2], of_torch[:2], strict=True):
            assert found is not None
            assert right is not None
            places, right_places = (t.view(torch.uint8).int() for t in (found, right))
            assert (places - right_places).abs().max() <= 1, op
            assert (places != right_places).float().mean() < 0.01, op
        for found, right in zip(others, others_of_torch, strict=True):  # equal but for the last bit, or that of fp32
            torch.testing.assert_close(found, right, rtol=torch.finfo(found.dtype).eps, atol=1e-5)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_the_maxima_keep_what_is_no_number(device: str, backend: Backend) -> None:
    given = drawn((2, 64, 40), device)
    for name in ("x", "dh"):
        given[name][1, 33, 5] = torch.nan
    for op, (operand, _) in results(given, FORMS[0], backend).items():
        assert operand.maxima.amax().isnan(), op


def test_what_is_no_number_reaches_the_operand(device: str) -> None:
    given = drawn((1, 32, 16), device)
    given["x"][0, 3, 5] = torch.nan
    operand = norm(given["x"], given["first"], EPS, given["unit"], ALL, backend="triton").y
    for form in operand[:2]:
        assert form is not None
    assert operand.rows is not None
    assert operand.columns is not None
    assert operand.rows[3].float().isnan().all()
    assert operand.columns[:, 3].float().isnan().all()
    assert operand.rows.float().isnan().sum() == 16


@pytest.mark.parametrize("shape", [(64, 256, 1152), (256, 256, 1152), (2, 37, 40)])
def test_programs_that_turn_rows_do_whole_tiles(shape: tuple[int, int, int]) -> None:
    x = torch.empty(shape, device="meta", dtype=torch.bfloat16)
    plans = [forward_plan(x, gated, gated, turned=True) for gated in (False, True)]
    for one in (*plans, backward_plan(x, True, True, True, turned=True), gate_plan(x, turned=True)):
        assert one.rows % one.constants["BLOCK_R"] == 0
        assert (one.blocks - 1) * one.rows < shape[1] <= one.blocks * one.rows


@pytest.mark.parametrize("form", FORMS[:3], ids=str)
def test_the_ops_pass_opcheck(device: str, form: Form) -> None:
    given, ways = drawn((2, 5, 24), device, torch.bfloat16), list(form)
    x, branch, bias, rest, unit = (given[name] for name in ("x", "branch", "bias", "rest", "unit"))
    statistics = torch.ones(2, 5, device=device)
    torch.library.opcheck(ops._norm, (x, None, None, given["first"], EPS, unit, ways))
    torch.library.opcheck(ops._norm, (x, branch, bias, rest, EPS, unit, ways))
    backward = (given["later"], given["dy"], given["dh"], x, branch, bias, rest, statistics, statistics, unit, ways)
    torch.library.opcheck(ops._gated_norm_backward, backward)
    torch.library.opcheck(ops._gate_backward, (given["dh"], branch, bias, rest, unit, ways))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"dy": torch.zeros(2, 3, 4)}, r"dy is .*\(2, 3, 4\) on cpu, expected that of x, torch.float32 \(2, 3, 8\)"),
        ({"branch": torch.zeros(2, 3, 8).double()}, "branch is torch.float64 .* expected that of x"),
        ({"bias": torch.zeros(4)}, r"bias is .*\(4,\) on cpu, expected torch.float32 \(8,\)"),
        ({"later": torch.zeros(2, 8)}, r"later is .*\(2, 8\) on cpu, expected torch.float32 \(2, 32\)"),
        ({"mean": torch.zeros(2)}, r"mean is .*\(2,\) on cpu, expected torch.float32 \(2, 3\)"),
        ({"unit": torch.zeros(2)}, r"unit is torch.float32 \(2,\) on cpu, expected one number"),
    ],
)
def test_tensors_that_a_kernel_would_misread_are_refused(changed: dict[str, Tensor], why: str) -> None:
    given: dict[str, Any] = drawn((2, 3, 8), "cpu") | {"mean": torch.zeros(2, 3), "rstd": torch.ones(2, 3)} | changed
    names = ("later", "dy", "dh", "x", "branch", "bias", "mean", "rstd", "unit")
    with pytest.raises(ValueError, match=why):
        gated_norm_backward(**{name: given[name] for name in names}, modulation=given["rest"], form=ALL)


@pytest.mark.parametrize(
    ("x", "modulation", "why"),
    [
        ((6, 8), (2, 32), r"x has shape \(6, 8\), expected \[B, T, D\]"),
        ((2, 3, 8), (3, 32), r"modulation has shape \(3, 32\), expected \(2, K \* 8\)"),
        ((2, 3, 8), (2, 16), "modulation has 2 parts, expected 3 or more"),
        ((1, 1, 4097), (1, 3 * 4097), "4097 channels, expected at most 4096"),
    ],
)
def test_wrong_arguments_are_refused(device: str, x: Any, modulation: Any, why: str) -> None:
    given, unit = torch.zeros(x, device=device), torch.tensor(1.0, device=device)
    with pytest.raises(ValueError, match=why):
        gated_norm(given, given, given[0], torch.zeros(modulation, device=device), EPS, unit, ALL, backend="triton")
