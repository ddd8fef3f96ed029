"""Gradients of queries, keys and values as one operand of FP8 products: numbers, sums, strides and forms."""

import pytest
import torch

from fastdiff_bench.correctness.accuracy import poisoned_memory
from fastdiff_kernels.fp8 import join as op
from fastdiff_kernels.fp8.join import join, join_packed
from fastdiff_kernels.fp8.values import Form
from fastdiff_kernels.names import Backend
from tests.support.rounded_sums import assert_summed

FORMS = (Form(rows=True, columns=True), Form(rows=True, plain=True), Form(plain=True))


def gradients(device: str, dtype: torch.dtype, layout: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    joined = torch.randn(2, 37, 3, 3, 24, generator=generator).to(device, dtype)
    parts = list(joined.permute(2, 0, 3, 1, 4).unbind(0))  # [B, T, 3, H, D] -> 3 x [B, H, T, D]
    if layout == "packed":
        return parts
    if layout == "expanded":
        return [parts[0], torch.ones((), dtype=dtype, device=device).expand(parts[1].shape), parts[2]]
    return [part.contiguous() for part in parts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["heads first", "packed", "expanded"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_numbers_are_those_of_torch(device: str, dtype: torch.dtype, layout: str, form: Form) -> None:
    (q, k, v), unit = gradients(device, dtype, layout), torch.tensor(2.0**-7, device=device)
    with poisoned_memory():
        ours, dbias = join(q, k, v, unit, form, backend="triton")
    torchs, expected = join(q, k, v, unit, form, backend="reference")
    for found, wanted in zip(ours[:3], torchs[:3], strict=True):
        assert (found is None) == (wanted is None)
        assert found is None or wanted is None or torch.equal(found.float(), wanted.float())
        assert found is None or found.is_contiguous()
    assert ours.maxima.amax() == torchs.maxima.amax()
    rows = torch.stack([q, k, v], 2).permute(0, 3, 2, 1, 4).flatten(2).flatten(0, 1).double()  # -> [B * T, 3 * H * D]
    for sums in (dbias, expected):
        assert sums.dtype == dtype
        assert_summed(sums, rows.sum(0), rows.abs().sum(0), len(rows))


def test_a_packed_gradient_is_its_own_plain_form(device: str) -> None:
    packed = torch.randn(2, 9, 3, 2, 16, device=device).bfloat16()
    unit, form = torch.tensor(2.0**-7, device=device), Form(rows=True, plain=True)
    operand, dbias = join_packed(packed, unit, form)
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    expected, sums = join(q, k, v, unit, form)
    assert operand.rows is not None
    assert operand.plain is not None
    assert expected.rows is not None
    assert torch.equal(operand.rows.float(), expected.rows.float())
    assert operand.plain.data_ptr() == packed.data_ptr()
    assert torch.equal(dbias, sums)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("part", range(3))
def test_the_maximum_keeps_what_is_no_number(device: str, part: int, backend: Backend) -> None:
    q, k, v = parts = gradients(device, torch.float32, "heads first")
    parts[part][1, 2, 30, 7] = torch.nan
    operand, _ = join(q, k, v, torch.tensor(1.0, device=device), FORMS[0], backend=backend)
    assert operand.maxima.amax().isnan()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_op_passes_opcheck(device: str, form: Form) -> None:
    parts = gradients(device, torch.bfloat16, "packed")
    torch.library.opcheck(op._join, (*parts, torch.tensor(1.0, device=device), list(form)))
