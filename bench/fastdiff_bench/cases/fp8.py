"""Operands of FP8 products, rows and columns, at the shapes of a DiT."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fastdiff_bench.cases.adaln import SAMPLES, SAMPLES_LARGE, TOKENS, WIDTHS
from fastdiff_bench.cases.bias_gradient import HEADS
from fastdiff_bench.cases.case import Case, Inputs, elements
from fastdiff_kernels.adaln import gated_modulated_norm_reference, gated_residual_reference, modulated_norm_reference
from fastdiff_kernels.fp8.adaln import gate_backward, gated_norm, gated_norm_backward, norm
from fastdiff_kernels.fp8.cast import cast
from fastdiff_kernels.fp8.gelu import gelu, gelu_backward
from fastdiff_kernels.fp8.join import join
from fastdiff_kernels.fp8.values import Form, Quantised
from fastdiff_kernels.gelu import gelu_reference
from fastdiff_kernels.names import Backend

_FORM = Form(rows=True, columns=True)
_UNIT = 2.0**-7
"""Scale at which a normal number of 3 standard deviations is 384."""


def _inputs(device: str, width: int, dtype: torch.dtype, samples: int) -> Inputs:
    x = torch.randn(samples * TOKENS, width, dtype=dtype, device=device)
    return {"x": x, "unit": torch.tensor(_UNIT, device=device)}


def _cast(inputs: Inputs, backend: Backend) -> list[Tensor]:
    return written(cast(inputs["x"], inputs["unit"], _FORM, backend=backend))


def _exact(inputs: Inputs) -> list[Tensor]:
    return numbers(inputs["x"], inputs["unit"])


def written(operand: Quantised) -> list[Tensor]:
    """Return rows, columns and the maximum."""
    assert operand.rows is not None
    assert operand.columns is not None
    return [operand.rows, operand.columns, operand.maxima.amax()]


def numbers(values: Tensor, unit: Tensor) -> list[Tensor]:
    """Return ``written`` of fp64 values ``[N, C]`` before rounding."""
    rows = (values / unit).clamp(-448, 448)
    return [rows, rows.t(), values.abs().amax()]


def _case(letter: str, dtype: torch.dtype) -> Case:
    build = partial(_inputs, width=WIDTHS[letter], dtype=dtype)
    return Case(
        op="fp8",
        chosen_as="adaln",
        shape=f"DiT-{letter}-cast-{TOKENS}x{WIDTHS[letter]}",
        dtype=dtype,
        least_arch=90,
        build=partial(build, samples=SAMPLES),
        build_large=partial(build, samples=SAMPLES_LARGE),
        call=_cast,
        exact=_exact,
        forward_operations=elements("x", 2),
    )


def _join_inputs(device: str, letter: str, samples: int) -> Inputs:
    heads, width = HEADS[letter]
    shape = (samples, TOKENS, heads, width)  # as cuDNN gives the gradients
    parts = {n: torch.randn(shape, device=device).bfloat16().transpose(1, 2) for n in ("dq", "dk", "dv")}
    return {**parts, "unit": torch.tensor(_UNIT, device=device)}


def _join(inputs: Inputs, backend: Backend) -> list[Tensor]:
    operand, dbias = join(**inputs, form=_FORM, backend=backend)
    return [*written(operand), dbias]


def _exact_join(inputs: Inputs) -> list[Tensor]:
    parts = torch.stack([inputs[n].transpose(1, 2) for n in ("dq", "dk", "dv")], 2)  # -> [B, T, 3, H, D]
    packed = parts.flatten(2).flatten(0, 1)
    return [*numbers(packed, inputs["unit"]), packed.sum(0)]


def _join_case(letter: str) -> Case:
    build = partial(_join_inputs, letter=letter)
    return Case(
        op="fp8",
        chosen_as="adaln",
        shape=f"DiT-{letter}-join-{TOKENS}x3x{HEADS[letter][0]}x{HEADS[letter][1]}",
        dtype=torch.bfloat16,
        least_arch=90,
        build=partial(build, samples=SAMPLES),
        build_large=partial(build, samples=SAMPLES_LARGE),
        call=_join,
        exact=_exact_join,
        sums=("out3",),
        forward_operations=lambda inputs: 3 * sum(int(inputs[n].numel()) for n in ("dq", "dk", "dv")),
    )


# Without the maxima: rounding one number in fp32 is a matter of chance, and tests compare them with the values.
def _gelu_inputs(device: str, dtype: torch.dtype, samples: int) -> Inputs:
    shape, unit = (samples * TOKENS, 4 * WIDTHS["XL"]), torch.tensor(_UNIT, device=device)
    return {"u": torch.randn(shape, dtype=dtype, device=device), "unit": unit}


def _gelu_gradients(device: str, dtype: torch.dtype, samples: int) -> Inputs:
    given = _gelu_inputs(device, dtype, samples)
    return {"dy": torch.randn_like(given["u"]), **given}


def _gelu(inputs: Inputs, backend: Backend) -> list[Tensor]:
    return written(gelu(inputs["u"], inputs["unit"], _FORM, backend=backend))[:2]


def _gelu_exact(inputs: Inputs) -> list[Tensor]:
    return numbers(gelu_reference(inputs["u"]), inputs["unit"])[:2]


def _gelu_backward(inputs: Inputs, backend: Backend) -> list[Tensor]:
    du, dbias = gelu_backward(inputs["dy"], inputs["u"], inputs["unit"], _FORM, backend=backend)
    return [*written(du)[:2], dbias]


def _gelu_backward_exact(inputs: Inputs) -> list[Tensor]:
    u = inputs["u"].detach().requires_grad_()
    (du,) = torch.autograd.grad(gelu_reference(u), u, inputs["dy"])
    return [*numbers(du, inputs["unit"])[:2], du.sum(0)]


def _gelu_case(way: str, dtype: torch.dtype) -> Case:
    backward = way == "gelu-backward"
    build = partial(_gelu_gradients if backward else _gelu_inputs, dtype=dtype)
    return Case(
        op="fp8",
        chosen_as="adaln",
        shape=f"DiT-XL-{way}",
        dtype=dtype,
        least_arch=90,
        build=partial(build, samples=1),
        build_large=partial(build, samples=SAMPLES_LARGE),
        call=_gelu_backward if backward else _gelu,
        exact=_gelu_backward_exact if backward else _gelu_exact,
        sums=("out2",) if backward else (),
        forward_operations=elements("u", 19 if backward else 10),
    )


_EPS = 1e-6
_WIDE_UNIT = 2.0**-4
"""Scale of products of normal numbers, of which few exceed 28."""


class _AdaLN(NamedTuple):
    """An op of adaLN; of the six parts of the modulation it has those from ``first`` on, as in the block."""

    tensors: tuple[str, ...]
    """Inputs like x."""
    first: int
    parts: int
    call: Callable[[Inputs, Backend], list[Tensor]]
    exact: Callable[[Inputs], list[Tensor]]
    operations: int
    """As in ``adaln``, and 1 of the cast."""
    sums: tuple[str, ...] = ()


def _norm(inputs: Inputs, backend: Backend) -> list[Tensor]:
    normed = norm(inputs["x"], inputs["modulation"], _EPS, inputs["unit"], _FORM, backend=backend)
    return [*written(normed.y)[:2], normed.mean, normed.rstd]


def _norm_exact(inputs: Inputs) -> list[Tensor]:
    shift, scale = _parts(inputs)
    y = modulated_norm_reference(inputs["x"], shift, scale, eps=_EPS)
    return [*numbers(y.flatten(0, 1), inputs["unit"])[:2], *_statistics(inputs["x"])]


def _gated_norm(inputs: Inputs, backend: Backend) -> list[Tensor]:
    x, branch, bias, modulation, unit = (inputs[name] for name in ("x", "branch", "bias", "modulation", "unit"))
    normed = gated_norm(x, branch, bias, modulation, _EPS, unit, _FORM, backend=backend)
    return [*written(normed.y)[:2], normed.h, normed.mean, normed.rstd]


def _gated_norm_exact(inputs: Inputs) -> list[Tensor]:
    gate, shift, scale, _ = _parts(inputs)
    h, y = gated_modulated_norm_reference(inputs["x"], inputs["branch"], gate, shift, scale, inputs["bias"], _EPS)
    return [*numbers(y.flatten(0, 1), inputs["unit"])[:2], h, *_statistics(h)]


def _gated_norm_backward(inputs: Inputs, backend: Backend) -> list[Tensor]:
    names = ("later", "dy", "dh", "x", "branch", "bias", "modulation", "mean", "rstd", "unit")
    found = gated_norm_backward(**{name: inputs[name] for name in names}, form=_FORM, backend=backend)
    assert found.dx is not None
    return [*written(found.dbranch)[:2], found.dx, found.dmodulation, found.dbias]


def _gated_norm_backward_exact(inputs: Inputs) -> list[Tensor]:
    names = ("x", "branch", "bias", "modulation")
    given = {name: inputs[name].detach().requires_grad_() for name in names}
    gate, shift, scale, _ = _parts(given)
    outputs = gated_modulated_norm_reference(given["x"], given["branch"], gate, shift, scale, given["bias"], _EPS)
    dx, dbranch, dbias, dmodulation = torch.autograd.grad(
        outputs, [given[name] for name in names], [inputs["dh"], inputs["dy"]]
    )
    operand = numbers(dbranch.flatten(0, 1), inputs["unit"])[:2]
    return [*operand, dx, dmodulation + inputs["later"], dbias]


def _gate_backward(inputs: Inputs, backend: Backend) -> list[Tensor]:
    dout, branch, bias, modulation, unit = (inputs[name] for name in ("dh", "branch", "bias", "modulation", "unit"))
    found = gate_backward(dout, branch, bias, modulation, unit, _FORM, backend=backend)
    return [*written(found.dbranch)[:2], found.dmodulation, found.dbias]


def _gate_backward_exact(inputs: Inputs) -> list[Tensor]:
    names = ("branch", "modulation", "bias")
    given = {name: inputs[name].detach().requires_grad_() for name in names}
    out = gated_residual_reference(inputs["dh"], given["branch"], _parts(given)[-1], given["bias"])
    dbranch, *rest = torch.autograd.grad(out, [given[name] for name in names], inputs["dh"])
    return [*numbers(dbranch.flatten(0, 1), inputs["unit"])[:2], *rest]


def _parts(inputs: Inputs) -> tuple[Tensor, ...]:
    return torch.split(inputs["modulation"], inputs["bias"].shape[0], dim=1)


def _statistics(h: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and reciprocal standard deviation of each row."""
    variance, mean = torch.var_mean(h, -1, correction=0)
    return mean, torch.rsqrt(variance + _EPS)


_ADALN = {
    "norm": _AdaLN(("x",), 0, 2, _norm, _norm_exact, 8),
    "gated-norm": _AdaLN(("x", "branch"), 2, 4, _gated_norm, _gated_norm_exact, 11),
    "gated-norm-backward": _AdaLN(
        ("dy", "dh", "x", "branch"), 2, 4, _gated_norm_backward, _gated_norm_backward_exact, 22, ("out3", "out4")
    ),
    "gate-backward": _AdaLN(("dh", "branch"), 2, 4, _gate_backward, _gate_backward_exact, 5, ("out2", "out3")),
}


def _adaln_inputs(device: str, op: _AdaLN, width: int, dtype: torch.dtype, samples: int) -> Inputs:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    given = {name: drawn(samples, TOKENS, width) for name in op.tensors}
    packed = drawn(samples, 6 * width).narrow(1, op.first * width, op.parts * width)
    given |= {"modulation": packed, "bias": drawn(width), "unit": torch.tensor(_WIDE_UNIT, device=device)}
    if "dy" in op.tensors:
        h = gated_residual_reference(given["x"], given["branch"], _parts(given)[0], given["bias"])
        mean, rstd = _statistics(h.float())
        given |= {"later": drawn(samples, op.parts * width), "mean": mean, "rstd": rstd}
    return given


def _adaln_case(way: str, letter: str, dtype: torch.dtype) -> Case:
    op = _ADALN[way]
    build = partial(_adaln_inputs, op=op, width=WIDTHS[letter], dtype=dtype)
    return Case(
        op="fp8",
        chosen_as="adaln",
        shape=f"DiT-{letter}-{way}-{TOKENS}x{WIDTHS[letter]}",
        dtype=dtype,
        least_arch=90,
        build=partial(build, samples=SAMPLES),
        build_large=partial(build, samples=SAMPLES_LARGE),
        call=op.call,
        exact=op.exact,
        sums=op.sums,
        forward_operations=elements(op.tensors[0], op.operations),
    )


CASES = [
    *(_case(letter, torch.bfloat16) for letter in WIDTHS),
    *(_join_case(letter) for letter in HEADS),
    *(_case("XL", dtype) for dtype in (torch.float32, torch.float16)),
    *(
        _gelu_case(way, dtype)
        for way in ("gelu", "gelu-backward")
        for dtype in (torch.bfloat16, torch.float32, torch.float16)
    ),
    *(_adaln_case(way, letter, torch.bfloat16) for letter in ("L", "XL") for way in _ADALN),
    *(_adaln_case(way, "XL", dtype) for dtype in (torch.float32, torch.float16) for way in _ADALN),
]
