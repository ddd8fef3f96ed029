"""Operands of FP8 products: rounding in kernels, the cast, the products and what they refuse."""

from typing import Any

import pytest
import torch

from fastdiff_bench.cases import cases
from fastdiff_bench.correctness.accuracy import poisoned_memory
from fastdiff_bench.correctness.check import providers, reason, run_checks
from fastdiff_kernels.fp8 import products
from fastdiff_kernels.fp8.cast import cast
from fastdiff_kernels.fp8.gelu import gelu, gelu_backward
from fastdiff_kernels.fp8.join import join
from fastdiff_kernels.fp8.values import E4M3, LARGEST, Form, Quantised, dequantised, quantise
from fastdiff_kernels.names import Backend
from tests.support.rounded_sums import assert_summed

BOTH = Form(rows=True, columns=True)
ONE = torch.tensor(1.0)
NO_BIAS = torch.zeros(1, dtype=torch.float64)


def numbers() -> torch.Tensor:
    """All e4m3 numbers, the middles between them and their neighbours, what overflows, and what is no number."""
    every = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    finite = every[every.isfinite()].sort().values
    middles = (finite[1:] + finite[:-1]) / 2
    around = [torch.nextafter(middles, torch.tensor(end)) for end in (-torch.inf, torch.inf)]
    others = torch.tensor([464.0, 465.0, 1e30, torch.inf, -torch.inf, torch.nan, 2.0**-10, 2.0**-11, -0.0])
    return torch.cat([every, middles, *around, others])


def test_kernels_round_as_torch_does(device: str) -> None:
    x = numbers().to(device)[None]
    kernel, plain = (cast(x, ONE.to(device), BOTH, backend=backend) for backend in ("triton", "reference"))
    for ours, torch_s in ((kernel.rows, plain.rows), (kernel.columns, plain.columns)):
        assert ours is not None
        assert torch_s is not None
        number = ~torch_s.float().isnan()
        assert torch.equal(~ours.float().isnan(), number)
        assert torch.equal(ours.view(torch.uint8)[number], torch_s.view(torch.uint8)[number])


@pytest.mark.parametrize("shape", [(1, 1), (65, 48), (130, 1152)])
@pytest.mark.parametrize("form", [BOTH, Form(rows=True), Form(columns=True), Form(rows=True, plain=True)])
def test_a_cast_is_that_of_torch(device: str, shape: tuple[int, int], form: Form) -> None:
    x, unit = torch.randn(shape, device=device).bfloat16(), torch.tensor(2.0**-5, device=device)
    kernel, plain = (cast(x, unit, form, backend=backend) for backend in ("triton", "reference"))
    for ours, torch_s in zip(kernel[:3], plain[:3], strict=True):
        assert (ours is None) == (torch_s is None)
        assert ours is None or torch_s is None or torch.equal(ours.float(), torch_s.float())
    assert kernel.maxima.amax() == plain.maxima.amax() == x.abs().amax().float()


@pytest.mark.parametrize("case", cases(("fp8",)), ids=str)
def test_cases_keep_the_rule_of_kernels(case: cases, device: str) -> None:  # type: ignore[valid-type]
    torch.manual_seed(0)
    state = torch.get_rng_state()

    def inputs() -> dict[str, torch.Tensor]:
        torch.set_rng_state(state)
        return case.build(device)  # type: ignore[attr-defined, no-any-return]

    found = {n: p for n, p in providers(case, device).items() if n != "compile"}  # type: ignore[arg-type]
    _, failures = run_checks(case, inputs, found)  # type: ignore[arg-type]
    assert not failures, {name: reason(error) for name, error in failures.items()}


def test_products_are_those_of_the_values() -> None:
    torch.manual_seed(0)
    x, w, dy, bias = torch.randn(32, 48), torch.randn(64, 48), torch.randn(32, 64), torch.randn(64)
    unit = torch.tensor(2.0**-4)
    eights = [cast(t, unit, BOTH) for t in (x, w, dy)]
    plains = [cast(t, unit, Form(plain=True)) for t in (x, w, dy)]
    exact = [dequantised(operand.rows, unit).double() for operand in eights if operand.rows is not None]
    for (qx, qw, qdy), (vx, vw, vdy) in ((eights, exact), (plains, [t.double() for t in (x, w, dy)])):
        dtype = torch.float32 if qx.rows is None else torch.bfloat16  # of the result
        assert_product(products.output(qx, qw, bias.to(dtype)), vx, vw.T, dtype, bias.to(dtype).double())
        assert_product(products.input_gradient(qdy, qw), vdy, vw, dtype)
        assert_product(products.weight_gradient(qdy, qx), vdy.T, vx, dtype)


def assert_product(
    found: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor = NO_BIAS
) -> None:
    assert found.dtype == dtype
    assert_summed(found, a @ b + bias, a.abs() @ b.abs() + bias.abs(), a.shape[1] + 1)


@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        (torch.zeros(16, 32), torch.zeros(16, 32), "is torch.float32"),
        (torch.zeros(32, 16, dtype=E4M3).t(), torch.zeros(16, 32, dtype=E4M3), r"a has strides \(1, 16\)"),
        (torch.zeros(16, 32, dtype=E4M3), torch.zeros(32, 16, dtype=E4M3).t(), r"b has strides \(1, 16\)"),
        (torch.zeros(16, 32, dtype=E4M3), torch.zeros(16, 48, dtype=E4M3), "differ in the last axis"),
        (torch.zeros(16, 24, dtype=E4M3), torch.zeros(16, 24, dtype=E4M3), "multiples of 16"),
        (torch.zeros(16, 32, dtype=E4M3), torch.zeros(24, 32, dtype=E4M3), "multiples of 16"),
    ],
)
def test_layouts_that_a_gpu_refuses_are_refused_on_a_cpu(a: torch.Tensor, b: torch.Tensor, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        products.product(a, b, ONE, ONE)


def test_values_beyond_the_largest_number_become_it_and_nan_stays() -> None:
    found = cast(torch.tensor([[1e3, -torch.inf, torch.nan]]), ONE, Form(rows=True)).rows
    assert found is not None
    assert found.float().tolist()[0][:2] == [LARGEST, -LARGEST]
    assert found.float()[0, 2].isnan()


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_maxima_keep_what_is_not_finite(device: str, value: float, backend: Backend) -> None:
    """In one of several parts: a step whose maximum is dropped would become a scale that clips."""
    values = torch.ones(130, 72, device=device)
    values[70, 3] = value
    one = torch.ones_like(values)
    operands = [
        cast(values, ONE.to(device), BOTH, backend=backend),
        gelu(values.abs(), ONE.to(device), BOTH, backend=backend),
        gelu_backward(values, one, ONE.to(device), BOTH, backend=backend)[0],
    ]
    for operand in operands:
        torch.testing.assert_close(
            operand.maxima.amax().cpu(), torch.tensor(abs(value)), equal_nan=True, rtol=0, atol=0
        )


def test_an_operand_without_the_form_of_a_product_is_named() -> None:
    empty = Quantised(None, None, None, ONE, ONE.view(1))
    with pytest.raises(ValueError, match="neither the FP8 form"):
        products.output(empty, empty)


MATRIX = torch.zeros(4, 8)
HEADS = torch.zeros(1, 2, 4, 8)


@pytest.mark.parametrize(
    ("op", "given", "why"),
    [
        (
            gelu_backward,
            {"dy": torch.zeros(1, 4), "u": torch.zeros(8, 4)},
            r"dy is .*\(1, 4\).*, expected that of u, .*",
        ),
        (
            gelu_backward,
            {"dy": MATRIX.bfloat16(), "u": MATRIX},
            "dy is torch.bfloat16 .*, expected that of u",
        ),
        (gelu, {"u": torch.zeros(1, 4, 8)}, r"u has shape \(1, 4, 8\), expected \[N, C\]"),
        (gelu, {"u": torch.zeros(4, 0)}, r"u has shape \(4, 0\), expected \[N, C\], none of them 0"),
        (gelu, {"u": MATRIX.double()}, "u is torch.float64, expected float32, bfloat16 or float16"),
        (
            gelu,
            {"u": MATRIX, "unit": ONE.double()},
            r"unit is torch.float64 \(\) on cpu, expected one number, torch.float32",
        ),
        (cast, {"x": MATRIX, "unit": torch.ones(2)}, r"unit is torch.float32 \(2,\) on cpu, expected one number"),
        (cast, {"x": torch.zeros(4)}, r"x has shape \(4,\), expected \[N, C\]"),
        (join, {"dq": HEADS, "dk": HEADS[:, :1], "dv": HEADS}, r"dk is .*\(1, 1, 4, 8\) on cpu, expected that of dq"),
        (join, {"dq": MATRIX, "dk": MATRIX, "dv": MATRIX}, r"dq has shape \(4, 8\), expected \[B, H, T, D\]"),
    ],
)
def test_arguments_that_a_kernel_would_misread_are_refused(op: Any, given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        op(**{"unit": ONE, "form": BOTH, **given})


@pytest.mark.parametrize("shape", [(1, 1), (65, 48), (130, 200)])
@pytest.mark.parametrize("ways", [(True, True, False), (True, False, True), (False, False, True), (True, True, True)])
def test_gelu_writes_what_torch_makes_of_its_values(
    device: str, shape: tuple[int, int], ways: tuple[bool, ...]
) -> None:
    """In fp32, the plain form holds the values before rounding."""
    form, all_forms = Form(*ways), Form(rows=True, columns=True, plain=True)
    unit = torch.tensor(2.0**-6, device=device)  # 448 of it is 7: some values are larger
    u, dy = (3 * torch.randn(shape, device=device) for _ in range(2))

    def operands(form: Form, backend: str) -> list[Quantised]:
        backward, _ = gelu_backward(dy, u, unit, form, backend=backend)  # type: ignore[arg-type]
        return [gelu(u, unit, form, backend=backend), backward]  # type: ignore[arg-type]

    with poisoned_memory():
        kernel, every = operands(form, "triton"), operands(all_forms, "triton")
    for ours, full, torch_s in zip(kernel, every, operands(all_forms, "reference"), strict=True):
        assert full.plain is not None
        expected = quantise(full.plain, unit, form, torch.float32)
        for found, right in zip(ours[:3], expected[:3], strict=True):
            assert (found is None) == (right is None)
            assert found is None or right is None or torch.equal(found.view(torch.uint8), right.view(torch.uint8))
        assert ours.maxima.amax() == expected.maxima.amax()
        torch.testing.assert_close(full.plain, torch_s.plain)


def test_gelu_sums_the_gradient_of_the_bias_before_it_is_rounded(device: str) -> None:
    unit, form = torch.tensor(2.0**-6, device=device), Form(rows=True, columns=True)
    u, dy = (torch.randn(200, 72, device=device) for _ in range(2))
    (_, kernel), (_, plain) = (gelu_backward(dy, u, unit, form, backend=b) for b in ("triton", "reference"))
    torch.testing.assert_close(kernel, plain)


def test_the_ops_of_gelu_pass_opcheck(device: str) -> None:
    u, unit = torch.randn(70, 48, device=device).bfloat16(), torch.tensor(0.5, device=device)
    for ways in ([True, True, False], [False, False, True]):
        torch.library.opcheck(torch.ops.fastdiff.fp8_gelu.default, (u, unit, ways))
        torch.library.opcheck(torch.ops.fastdiff.fp8_gelu_backward.default, (u, u, unit, ways))
