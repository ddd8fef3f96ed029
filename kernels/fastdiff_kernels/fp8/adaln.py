"""The ops of ``adaln`` whose output, or gradient of the branch, is an operand of FP8 products; see there for formulas.

    norm            y = normed(x) * (1 + scale) + shift                              y
    gated_norm      h = x + gate * (branch + bias),  y of h                           y
    gated_norm_backward                                                              dbranch
    gate_backward   of out = h + gate * (branch + bias): dbranch = gate * dout        dbranch

The operand, in the last column, has one row per token: ``[B * T, D]``. The kernels are those of ``adaln``: in place of
the 2 bytes per element in 16 bits they write 1 per form in FP8. Those that hold whole rows write e4m3 rows first; then
each program reads back what it wrote, usually from a cache, and writes the transpose by tiles of 32 rows: 1 byte more,
where a tile of whole rows would leave a processor room for one program, whose loads and stores take turns.

Bytes per element of 16 bits, where R is the number of tokens that one program works through::

                           rows and columns   rows and plain
    norm                   5 + 4 / R          5 + 4 / R
    gated_norm             9 + 8 / R          9 + 8 / R
    gated_norm_backward    13 + 38 / R        13 + 38 / R
    gate_backward          6 + 20 / R         7 + 20 / R
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastdiff_kernels.adaln import launches, norm_gradients
from fastdiff_kernels.adaln.plan import MAX_WIDTH, Plan, backward_plan, forward_plan, gate_plan
from fastdiff_kernels.dispatch import choose, plain
from fastdiff_kernels.fp8.values import E4M3, Form, Quantised, blank, by_form, expect, quantise, validate
from fastdiff_kernels.names import Backend


class Normed(NamedTuple):
    """Output of a norm."""

    y: Quantised
    """``[B * T, D]``."""
    mean: Tensor
    """fp32 ``[B, T]``."""
    rstd: Tensor
    """fp32 ``[B, T]``."""
    h: Tensor
    """``[B, T, D]``, what was normalised."""


class BranchGradients(NamedTuple):
    """Gradients of a gated branch and of all else that its op takes."""

    dbranch: Quantised
    """``[B * T, D]``."""
    dbias: Tensor
    """``[D]``."""
    dmodulation: Tensor
    """``[B, K * D]``: of the whole modulation, as far as it is known."""
    dx: Tensor | None
    """``[B, T, D]``; None: that of the gate alone, whose residual stream passes by."""


def _parts(modulation: Tensor, width: int) -> list[Tensor]:
    """Shifts, scales and gates in fp32, ``[B, 1, D]`` each."""
    return list(torch.split(modulation.float().unsqueeze(1), width, dim=2))


def norm_reference(x: Tensor, modulation: Tensor, eps: float, unit: Tensor, form: Form) -> Normed:
    """``norm`` in plain torch."""
    shift, scale = _parts(modulation, x.shape[2])[:2]
    normed, mean, rstd = torch.native_layer_norm(x.float(), x.shape[-1:], None, None, eps)
    y = normed * (1 + scale) + shift
    return Normed(quantise(y.flatten(0, 1), unit, form, x.dtype), mean.squeeze(-1), rstd.squeeze(-1), x)


def norm(
    x: Tensor, modulation: Tensor, eps: float, unit: Tensor, form: Form, *, backend: Backend | None = None
) -> Normed:
    """``layer_norm(x) * (1 + scale) + shift`` as an operand.

    Args:
        x: ``[B, T, D]`` fp32, bf16 or fp16, D at most 4096 for the kernels.
        modulation: ``[B, K * D]``, whose first parts are shift and scale; rows of any stride.
        eps: added to the variance.
        unit: scale of the operand, fp32 ``[]``, a power of two.
        form: what to write of the operand.
        backend: implementation; None: that of ``adaln``.

    Raises:
        ValueError: a wrong shape, dtype or device, or no such backend.
        RuntimeError: Triton was requested and cannot run here.
    """
    chosen = _chosen(2, modulation, unit, backend, x=x)
    if chosen != "triton":
        found: Normed = plain(norm_reference, chosen)(x, modulation, eps, unit, form)
        return found
    maxima, mean, rstd, *written = _norm(x, None, None, modulation, eps, unit, list(form))
    return Normed(Quantised(*by_form(written, form), unit, maxima), mean, rstd, x)


def gated_norm_reference(
    x: Tensor, branch: Tensor, bias: Tensor, modulation: Tensor, eps: float, unit: Tensor, form: Form
) -> Normed:
    """``gated_norm`` in plain torch."""
    width = x.shape[2]
    gate = _parts(modulation, width)[0]
    h = (x.float() + gate * (branch.float() + bias.float())).to(x.dtype)
    return norm_reference(h, modulation[:, width:], eps, unit, form)


def gated_norm(
    x: Tensor, branch: Tensor, bias: Tensor, modulation: Tensor, eps: float, unit: Tensor, form: Form, *,
    backend: Backend | None = None,
) -> Normed:  # fmt: skip
    """``norm`` of ``h = x + gate * (branch + bias)``.

    Arguments and errors as for ``norm``; ``branch`` is as ``x``, ``bias [D]``, and the first parts of ``modulation``
    are gate, shift and scale.
    """
    chosen = _chosen(3, modulation, unit, backend, x=x, branch=branch)
    expect(bias=(bias, x.dtype, x.shape[2:]))
    if chosen != "triton":
        found: Normed = plain(gated_norm_reference, chosen)(x, branch, bias, modulation, eps, unit, form)
        return found
    maxima, mean, rstd, h, *written = _norm(x, branch, bias, modulation, eps, unit, list(form))
    return Normed(Quantised(*by_form(written, form), unit, maxima), mean, rstd, h)


def norm_backward_reference(
    dy: Tensor, dh: Tensor, x: Tensor, modulation: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """``norm_backward`` in plain torch."""
    _, scale = _parts(modulation, x.shape[2])
    up = dy.float()
    normed = (x.float() - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    dx = dh.float() + _of_normed(up * (1 + scale), normed, rstd)
    return dx.to(x.dtype), torch.cat([up.sum(1), (up * normed).sum(1)], dim=1).to(x.dtype)


def _of_normed(g: Tensor, normed: Tensor, rstd: Tensor) -> Tensor:
    """Gradient of what was normalised, for ``g`` of ``normed``."""
    inner = g - g.mean(-1, keepdim=True) - normed * (g * normed).mean(-1, keepdim=True)
    return rstd.unsqueeze(-1) * inner


def norm_backward(
    dy: Tensor, dh: Tensor, x: Tensor, modulation: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of ``norm``, none of them an operand: ``dx [B, T, D]``, and that of ``modulation``.

    ``modulation [B, 2D]`` is shift and scale side by side. ``dy`` is the gradient of the output, ``dh`` that of the
    residual stream beside, ``[B, T, D]`` each.
    """
    if choose("adaln", x) != "triton":
        return norm_backward_reference(dy, dh, x, modulation, mean, rstd)
    return norm_gradients(dy, dh, x, modulation, mean, rstd)


def gated_norm_backward_reference(
    later: Tensor, dy: Tensor, dh: Tensor, x: Tensor, branch: Tensor, bias: Tensor, modulation: Tensor, mean: Tensor,
    rstd: Tensor, unit: Tensor, form: Form,
) -> BranchGradients:  # fmt: skip
    """``gated_norm_backward`` in plain torch."""
    gate, _, scale, *_ = _parts(modulation, x.shape[2])
    dy, branch = dy.float(), branch.float() + bias.float()
    h = (x.float() + gate * branch).to(x.dtype).float()
    normed = (h - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    dx = dh.float() + _of_normed(dy * (1 + scale), normed, rstd)
    dbranch = (gate * dx).flatten(0, 1)
    dparts = torch.cat([(branch * dx).sum(1), dy.sum(1), (dy * normed).sum(1)], dim=1)
    dmodulation = later.float() + torch.nn.functional.pad(dparts, (0, later.shape[1] - dparts.shape[1]))
    operand = quantise(dbranch, unit, form, x.dtype)
    return BranchGradients(operand, dbranch.sum(0).to(x.dtype), dmodulation.to(x.dtype), dx.to(x.dtype))


def gated_norm_backward(
    later: Tensor, dy: Tensor, dh: Tensor, x: Tensor, branch: Tensor, bias: Tensor, modulation: Tensor, mean: Tensor,
    rstd: Tensor, unit: Tensor, form: Form, *, backend: Backend | None = None,
) -> BranchGradients:  # fmt: skip
    """Gradients of ``gated_norm``.

    Args:
        later: gradient of the modulation by the ops that took their parts later.
        dy: gradient of the operand, ``[B, T, D]``.
        dh: gradient of the residual stream, likewise.
        x: as given to ``gated_norm``, and so are branch, bias, modulation and backend, and the errors.
        branch: see ``x``.
        bias: see ``x``.
        modulation: see ``x``.
        mean: as returned by ``gated_norm``.
        rstd: likewise.
        unit: scale of the operand, which is the gradient of the branch.
        form: what to write of it.
        backend: see ``x``.
    """
    chosen = _chosen(3, modulation, unit, backend, x=x, branch=branch, dy=dy, dh=dh)
    statistics = torch.float32, x.shape[:2]
    expect(
        bias=(bias, x.dtype, x.shape[2:]), later=(later, x.dtype, modulation.shape), mean=(mean, *statistics),
        rstd=(rstd, *statistics),
    )  # fmt: skip
    if chosen != "triton":
        found: BranchGradients = plain(gated_norm_backward_reference, chosen)(
            later, dy, dh, x, branch, bias, modulation, mean, rstd, unit, form
        )
        return found
    maxima, dmodulation, dbias, dx, *written = _gated_norm_backward(
        later, dy, dh, x, branch, bias, modulation, mean, rstd, unit, list(form)
    )
    return BranchGradients(Quantised(*by_form(written, form), unit, maxima), dbias, dmodulation, dx)


def gate_backward_reference(
    dout: Tensor, branch: Tensor, bias: Tensor, modulation: Tensor, unit: Tensor, form: Form
) -> BranchGradients:
    """``gate_backward`` in plain torch."""
    up, width = dout.float(), dout.shape[2]
    dgate = (up * (branch.float() + bias.float())).sum(1)
    dmodulation = torch.nn.functional.pad(dgate, (modulation.shape[1] - width, 0)).to(dout.dtype)
    dbranch = (_parts(modulation, width)[-1] * up).flatten(0, 1)
    operand = quantise(dbranch, unit, form, dout.dtype)
    return BranchGradients(operand, dbranch.sum(0).to(dout.dtype), dmodulation, None)


def gate_backward(
    dout: Tensor, branch: Tensor, bias: Tensor, modulation: Tensor, unit: Tensor, form: Form, *,
    backend: Backend | None = None,
) -> BranchGradients:  # fmt: skip
    """Gradients of ``gate * (branch + bias)``, for ``dout [B, T, D]``.

    ``branch`` is as ``dout``, ``bias [D]``, and the gate is the last part of ``modulation``; the gradients of its other
    parts are 0. The rest as for ``gated_norm_backward``.
    """
    chosen = _chosen(1, modulation, unit, backend, dout=dout, branch=branch)
    expect(bias=(bias, dout.dtype, dout.shape[2:]))
    if chosen != "triton":
        found: BranchGradients = plain(gate_backward_reference, chosen)(dout, branch, bias, modulation, unit, form)
        return found
    maxima, dmodulation, dbias, *written = _gate_backward(dout, branch, bias, modulation, unit, list(form))
    return BranchGradients(Quantised(*by_form(written, form), unit, maxima), dbias, dmodulation, None)


def _chosen(parts: int, modulation: Tensor, unit: Tensor, backend: Backend | None, **given: Tensor) -> Backend:
    """Return the implementation; ValueError: it does not take these arguments."""
    validate("[B, T, D]", unit, **given)
    name, x = next(iter(given.items()))
    batch, _, width = x.shape
    if modulation.dim() != 2 or modulation.shape[0] != batch or modulation.shape[1] % width:
        raise ValueError(
            f"modulation has shape {tuple(modulation.shape)}, expected ({batch}, K * {width}) as {name} is "
            f"{tuple(x.shape)}"
        )
    if modulation.shape[1] < parts * width:
        raise ValueError(f"modulation has {modulation.shape[1] // width} parts, expected {parts} or more")
    chosen = choose("adaln", x, backend)
    if chosen == "triton" and width > MAX_WIDTH:
        raise ValueError(f"{name} has {width} channels, expected at most {MAX_WIDTH}; use backend 'reference'")
    return chosen


def _target(written: list[Tensor], form: list[bool], maxima: Tensor, unit: Tensor, like: Tensor) -> launches.Target:
    """Where a kernel writes; columns come from rows, which it needs even where nothing else does."""
    rows, columns, unrounded = by_form(written, form)
    if rows is None and columns is not None:
        rows = like.new_empty((columns.shape[1], columns.shape[0]), dtype=E4M3)
    return launches.Target(unrounded, rows, columns, maxima, unit)


def _operand(x: Tensor, programs: int, form: list[bool]) -> tuple[Tensor, list[Tensor]]:
    """Memory for maxima, and for ``[B * T, D]`` in the forms that were asked for."""
    batch, length, width = x.shape
    return x.new_empty(programs, dtype=torch.float32), blank(x, (batch * length, width), form)


def _forward_plan(x: Tensor, branch: Tensor | None, form: list[bool]) -> Plan:
    return forward_plan(x, branch is not None, branch is not None, turned=Form(*form).columns)


@torch.library.custom_op("fastdiff::fp8_norm", mutates_args=())
def _norm(
    x: Tensor, branch: Tensor | None, bias: Tensor | None, packed: Tensor, eps: float, unit: Tensor, form: list[bool]
) -> list[Tensor]:
    """``[maxima, mean, rstd]``, for a branch ``h``, and of rows, columns and plain those asked for."""
    outputs: list[Tensor] = _empty_norm(x, branch, bias, packed, eps, unit, form)
    maxima, mean, rstd, *rest = outputs
    h = None if branch is None else rest.pop(0)
    target = _target(rest, form, maxima, unit, x)
    plan = _forward_plan(x, branch, form)
    launches.norm_forward(target, h, mean, rstd, x, branch, bias, None, packed, 0, eps, plan)
    return outputs


@_norm.register_fake
def _empty_norm(
    x: Tensor, branch: Tensor | None, bias: Tensor | None, packed: Tensor, eps: float, unit: Tensor, form: list[bool]
) -> list[Tensor]:
    maxima, written = _operand(x, x.shape[0] * _forward_plan(x, branch, form).blocks, form)
    mean, rstd = (x.new_empty(x.shape[:2], dtype=torch.float32) for _ in range(2))
    h = [] if branch is None else [x.new_empty(x.shape)]
    return [maxima, mean, rstd, *h, *written]


@torch.library.custom_op("fastdiff::fp8_gated_norm_backward", mutates_args=())
def _gated_norm_backward(
    later: Tensor, dy: Tensor, dh: Tensor, x: Tensor, branch: Tensor, bias: Tensor, packed: Tensor, mean: Tensor,
    rstd: Tensor, unit: Tensor, form: list[bool],
) -> list[Tensor]:  # fmt: skip
    """``[maxima, dpacked, dbias, dx]``, and of rows, columns and plain those asked for."""
    outputs: list[Tensor] = _empty_gradients(later, dy, dh, x, branch, bias, packed, mean, rstd, unit, form)
    maxima, dpacked, dbias, dx, *written = outputs
    target = _target(written, form, maxima, unit, x)
    plan = backward_plan(x, True, True, True, turned=Form(*form).columns)
    launches.norm_backward(
        target, dx, dpacked, dbias, None, later, dy, dh, x, branch, bias, None, packed, 0, mean, rstd, plan
    )
    return outputs


@_gated_norm_backward.register_fake
def _empty_gradients(
    later: Tensor, dy: Tensor, dh: Tensor, x: Tensor, branch: Tensor, bias: Tensor, packed: Tensor, mean: Tensor,
    rstd: Tensor, unit: Tensor, form: list[bool],
) -> list[Tensor]:  # fmt: skip
    plan = backward_plan(x, True, True, True, turned=Form(*form).columns)
    maxima, written = _operand(x, x.shape[0] * plan.blocks, form)
    return [maxima, packed.new_empty(packed.shape), bias.new_empty(bias.shape), x.new_empty(x.shape), *written]


@torch.library.custom_op("fastdiff::fp8_gate_backward", mutates_args=())
def _gate_backward(
    dout: Tensor, branch: Tensor, bias: Tensor, packed: Tensor, unit: Tensor, form: list[bool]
) -> list[Tensor]:
    """``[maxima, dpacked, dbias]``, and of rows, columns and plain those asked for."""
    outputs: list[Tensor] = _empty_gate_gradients(dout, branch, bias, packed, unit, form)
    maxima, dpacked, dbias, *written = outputs
    rows, columns, unrounded = by_form(written, form)
    target = launches.Target(unrounded, rows, columns, maxima, unit)
    part, plan = packed.shape[1] // dout.shape[2] - 1, gate_plan(dout, turned=Form(*form).columns)
    launches.gate_backward(target, dpacked, dbias, None, dout, branch, bias, packed, part, plan)
    return outputs


@_gate_backward.register_fake
def _empty_gate_gradients(
    dout: Tensor, branch: Tensor, bias: Tensor, packed: Tensor, unit: Tensor, form: list[bool]
) -> list[Tensor]:
    along, across = launches.gate_grid(dout, gate_plan(dout, turned=Form(*form).columns))
    maxima, written = _operand(dout, along * across, form)
    return [maxima, packed.new_empty(packed.shape), bias.new_empty(bias.shape), *written]
