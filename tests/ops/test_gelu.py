"""GELU, GEGLU and SwiGLU behind a linear layer: accuracy, large numbers, compilation, bytes and refusals."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fastdiff_bench.correctness.accuracy import assert_as_accurate_as_eager, evaluate
from fastdiff_kernels import bias_gradient
from fastdiff_kernels import geglu as geglu_file
from fastdiff_kernels import gelu as gelu_file
from fastdiff_kernels import swiglu as swiglu_file
from fastdiff_kernels.geglu import geglu, geglu_reference
from fastdiff_kernels.gelu import gelu, gelu_reference
from fastdiff_kernels.swiglu import swiglu, swiglu_reference

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@dataclass(frozen=True)
class Form:
    op: Any
    reference: Any
    backward: Any
    halves: int
    """Columns of u per column of the result."""
    gate: int = 0
    """Half of u that is activated."""

    def result(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] // self.halves)


FORMS = {
    "gelu": Form(gelu, gelu_reference, gelu_file._gelu_backward, 1),
    "geglu": Form(geglu, geglu_reference, geglu_file._geglu_backward, 2, 1),
    "swiglu": Form(swiglu, swiglu_reference, swiglu_file._swiglu_backward, 2),
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def normal(shape, device, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def leaves(**tensors):
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def kernel(form, **given):
    return form.op(**given, backend="triton")


@pytest.mark.parametrize("shape", [(2, 37, 200), (3, 1040), (40, 6)], ids=str)
@dtypes
@forms
def test_it_is_as_accurate_as_eager(form, shape, dtype, device):
    inputs = leaves(u=3 * normal(shape, device, dtype), bias=normal(shape[-1:], device, dtype, 1))
    upstream = [normal(form.result(shape), device, seed=2)]
    ours = lambda **given: kernel(form, **given)  # noqa: E731
    assert_as_accurate_as_eager(ours, form.reference, inputs, upstream, sums={"dbias"})


@forms
def test_without_a_bias_the_gradient_of_the_input_is_the_same(form, device):
    u, bias = normal((5, 24), device).requires_grad_(), torch.zeros(24, device=device)
    upstream = normal(form.result((5, 24)), device, seed=2)
    alone, [summed, _] = (
        torch.autograd.grad(kernel(form, **given), list(given.values()), upstream)
        for given in ({"u": u}, leaves(u=u, bias=bias))
    )
    assert torch.equal(alone[0], summed)


@dtypes
@forms
def test_in_compiled_code_it_is_as_accurate_as_eager(form, dtype, device):
    """Where the forward pass of GELU is written with a sigmoid."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda **given: kernel(form, **given), backend="aot_eager", fullgraph=True)
    inputs = leaves(u=3 * normal((9, 200), device, dtype), bias=normal((200,), device, dtype, 1))
    upstream = [normal(form.result((9, 200)), device, seed=2)]
    assert_as_accurate_as_eager(compiled, form.reference, inputs, upstream, sums={"dbias"})


LARGE = [-1e30, -1e4, -88.0, -30.0, 0.0, 30.0, 88.0, 1e4, 1e30]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_numbers_do_not_overflow(dtype, device):
    """Where torch's kernel on CUDA gives numbers, so does this one, the same."""
    u = torch.tensor([LARGE[1:-1]], device=device, dtype=dtype)  # the cube of 1e30 is infinite, for torch too
    got = evaluate(lambda u: kernel(FORMS["gelu"], u=u), leaves(u=u), [torch.ones_like(u)])
    assert got["du"].tolist() == [[0, 0, 0, 0.5, 1, 1, 1]]
    gate = torch.tensor([LARGE], device=device, dtype=dtype)
    for name in ("geglu", "swiglu"):
        form = FORMS[name]

        def halves(value, gate, form=form):
            return torch.cat([value, gate] if form.gate else [gate, value], 1)

        got = evaluate(
            lambda u, form=form: kernel(form, u=u),
            leaves(u=halves(torch.ones_like(gate), gate)),
            [torch.ones_like(gate)],
        )
        of_value, of_gate = ([*[0.0] * 5, *LARGE[5:]], [*[0.0] * 4, 0.5, *[1.0] * 4])
        expected = halves(*(torch.tensor([one], device=device, dtype=dtype) for one in (of_value, of_gate)))
        # A sigmoid has not vanished at -30.
        torch.testing.assert_close(got["du"], expected, rtol=1e-6, atol=0 if name == "geglu" else 1e-11)


@forms
def test_what_is_not_finite_stays_so(form, device):
    bad = torch.tensor([float("nan"), float("inf"), -float("inf")], device=device)
    u = torch.ones(3, form.halves, device=device)
    u[:, form.gate] = bad
    u.requires_grad_()
    (du,) = torch.autograd.grad(kernel(form, u=u).sum(), u)
    assert du[:, form.gate].isnan().all()
    compiled = torch.compile(lambda u: kernel(form, u=u), backend="aot_eager")
    torch.testing.assert_close(compiled(u), form.reference(u), equal_nan=True)


def test_of_w12_the_first_half_is_activated(device):
    gate, value = normal((4, 6), device), normal((4, 6), device, seed=1)
    y = kernel(FORMS["swiglu"], u=torch.cat([gate, value], 1))
    torch.testing.assert_close(y, gate / (1 + torch.exp(-gate)) * value)


@forms
def test_the_op_passes_opcheck(form, device):
    u = normal((2, 5, 40), device, torch.bfloat16)
    torch.library.opcheck(form.backward, (normal(form.result((2, 5, 40)), device, torch.bfloat16), u))


@pytest.mark.parametrize("shape", [(0, 4, 8), (4, 0)], ids=str)
@forms
def test_nothing_gives_nothing(form, shape, device):
    empty = leaves(u=torch.zeros(shape, device=device), bias=torch.ones(shape[-1], device=device))
    got = evaluate(lambda **given: kernel(form, **given), empty, [torch.zeros(form.result(shape), device=device)])
    assert got["du"].shape == shape
    assert got["dbias"].tolist() == [0] * shape[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="counted in the interpreter")
@forms
def test_bytes_per_element_are_those_of_the_documentation(form, device):
    from tests.support.benches.traffic import counting

    rows, columns = 256, 256
    u = normal((rows, form.halves * columns), device, torch.bfloat16)
    each, (programs, _) = bias_gradient.plan(u, rows, columns)
    with counting() as traffic:
        form.backward(u[:, :columns].contiguous(), u)
    sums = form.halves * (8 * programs * columns + 2 * columns)
    assert traffic.bytes == (6 if form.halves == 1 else 10) * rows * columns + sums
    assert each == rows // programs == 64


BAD = {
    "bias": (gelu, (2, 8), (7,), {}, r"bias has shape \(7,\), expected \(8,\) as u is \(2, 8\)"),
    "odd": (geglu, (2, 7), (7,), {}, r"u has shape \(2, 7\), expected an even last axis"),
    "odd w12": (swiglu, (2, 7), (7,), {}, r"u has shape \(2, 7\), expected an even last axis: gates, then values"),
    "double": (gelu, (2, 8), (8,), {"dtype": torch.float64}, "u is torch.float64, expected float32, bfloat16"),
    "mixed": (geglu, (2, 8), (8,), {"bias": torch.bfloat16}, r"bias is torch.bfloat16 on .*use bias.to\(u\)"),
}


@pytest.mark.parametrize(("function", "u", "bias", "options", "message"), BAD.values(), ids=BAD)
def test_refusals_say_what_was_given(function, u, bias, options, message, device):
    dtype = options.get("dtype", torch.float32)
    given = (
        torch.zeros(u, device=device, dtype=dtype),
        torch.zeros(bias, device=device, dtype=options.get("bias", dtype)),
    )
    with pytest.raises(ValueError, match=message):
        function(*given, backend="triton")
