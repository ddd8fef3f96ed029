"""The split that sums the gradient of a bias: accuracy, compilation, bytes and refusals."""

import pytest
import torch

from fastdiff_bench.correctness.accuracy import assert_as_accurate_as_eager, evaluate
from fastdiff_kernels import bias_gradient as op
from fastdiff_kernels import dispatch
from fastdiff_kernels.bias_gradient import unpacked, unpacked_reference
from fastdiff_kernels.packed_attention import packed_attention

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
ORDERS = ("parts", "heads")


def normal(shape, device, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def leaves(**tensors):
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def packed(batch, length, heads, width, dtype, device, order="parts"):
    """A projection ``[B, T, 3, H, D]``, in memory by part or by head."""
    shape = (batch, length, 3, heads, width) if order == "parts" else (batch, length, heads, 3, width)
    u = normal(shape, device, dtype)
    return leaves(u=u if order == "parts" else u.transpose(2, 3), bias=normal((3 * heads * width,), device, dtype, 1))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", ["heads first", "tokens first", "packed", "expanded"])
@dtypes
def test_gradients_of_queries_keys_and_values_become_one(order, layout, dtype, device):
    inputs = packed(2, 9, 3, 24, dtype, device, order)
    gradients = [normal((2, 3, 9, 24), device, seed=seed) for seed in (5, 6, 7)]
    if layout == "tokens first":
        gradients = [g.transpose(1, 2).contiguous().transpose(1, 2) for g in gradients]
    if layout == "packed":
        gradients = list(torch.stack([g.transpose(1, 2) for g in gradients], 2).permute(2, 0, 3, 1, 4).unbind(0))
    if layout == "expanded":
        gradients[1] = torch.ones((), device=device).expand(2, 3, 9, 24)
    ours = lambda **given: unpacked(**given, backend="triton")  # noqa: E731
    assert_as_accurate_as_eager(ours, unpacked_reference, inputs, gradients, sums={"dbias"})
    got = evaluate(ours, inputs, gradients)
    assert got["du"].stride() == inputs["u"].stride()
    assert all(got[f"out{n}"].data_ptr() == inputs["u"][:, :, n].data_ptr() for n in range(3))


@pytest.mark.parametrize("backend", ["short", "sdpa"])
def test_packed_attention_gives_a_bias_the_sum_of_its_own_gradient(backend, device):
    inputs = packed(2, 16, 2, 64, torch.float32, device)
    upstream = [normal((2, 16, 128), device, seed=5)]
    with dispatch.forced(adaln="triton"):
        got = evaluate(lambda u, bias: packed_attention(u, bias=bias, backend=backend), inputs, upstream)
    alone = evaluate(lambda u: packed_attention(u, backend=backend), {"u": inputs["u"]}, upstream)
    torch.testing.assert_close(got["dbias"], alone["du"].sum((0, 1)).flatten())
    torch.testing.assert_close(got["du"], alone["du"])
    torch.testing.assert_close(got["out0"], alone["out0"])


@pytest.mark.parametrize("order", ORDERS)
def test_the_op_passes_opcheck(order, device):
    gradients = [normal((2, 3, 5, 8), device, seed=seed) for seed in range(3)]
    torch.library.opcheck(op._join, (*gradients, order == "parts"))


def test_nothing_gives_nothing(device):
    empty = packed(0, 4, 2, 8, torch.float32, device)
    upstream = [torch.zeros(0, 2, 4, 8, device=device)] * 3
    got = evaluate(lambda **given: unpacked(**given, backend="triton"), empty, upstream)
    assert got["du"].shape == (0, 4, 3, 2, 8)
    assert got["dbias"].tolist() == [0] * 48


@pytest.mark.skipif(torch.cuda.is_available(), reason="counted in the interpreter")
def test_bytes_per_element_are_those_of_the_documentation(device):
    from tests.support.benches.traffic import counting

    rows, columns = 256, 256
    parts = [normal((1, 4, rows, 64), device, torch.bfloat16, seed) for seed in range(3)]
    each, (programs, _) = op.plan(parts[0], rows, columns)
    with counting() as traffic:
        op._join(*parts, True)
    assert traffic.bytes == 3 * (4 * rows * columns + 8 * programs * columns + 2 * columns)
    assert each == rows // programs == 64


BAD = {
    "bias": ((1, 2, 3, 2, 4), (7,), {}, r"bias has shape \(7,\), expected \(24,\) as u is \(1, 2, 3, 2, 4\)"),
    "packed": ((2, 4, 24), (24,), {}, r"u has shape \(2, 4, 24\), expected \[B, T, 3, H, D\]"),
    "double": ((1, 2, 3, 2, 4), (24,), {"dtype": torch.float64}, "u is torch.float64, expected float32, bfloat16"),
    "mixed": ((1, 2, 3, 2, 4), (24,), {"bias": torch.bfloat16}, r"bias is torch.bfloat16 on .*use bias.to\(u\)"),
}


@pytest.mark.parametrize(("u", "bias", "options", "message"), BAD.values(), ids=BAD)
def test_refusals_say_what_was_given(u, bias, options, message, device):
    dtype = options.get("dtype", torch.float32)
    given = (
        torch.zeros(u, device=device, dtype=dtype),
        torch.zeros(bias, device=device, dtype=options.get("bias", dtype)),
    )
    with pytest.raises(ValueError, match=message):
        unpacked(*given, backend="triton")
