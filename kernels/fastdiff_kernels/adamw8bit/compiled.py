"""One step of AdamW with 8-bit moments on a CPU, by ``torch.compile``: the reference to the bit, in one pass.

It is for the state that ZeRO offloads to host memory. One graph takes any number of blocks; the numbers of the step are
a tensor, so that no step compiles anew. Whole blocks are updated where they lie. Blocks of which a slice has a part,
and slices of a few blocks, are left to the reference, and so are parameters in bf16: their rounding needs random words.

Inductor contracts no product and sum, and its roots and divisions are rounded correctly. ``unavailable`` compares steps
with the reference before the first use, on the machine where it runs.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import pairwise
from os import environ
from typing import Any

import torch
from torch import Tensor

from fastdiff_kernels.adamw.averages import averaged_reference
from fastdiff_kernels.adamw8bit.blocks import Blocks, Slice, Whole, build_blocks
from fastdiff_kernels.adamw8bit.companding import BLOCK, LEVELS_M, LEVELS_V, SMALLEST_SCALE, words_of_lanes
from fastdiff_kernels.adamw8bit.reference import DeviceStep, Extras, Moments, Step, adamw8bit_reference

_FEWEST = 8
"""Blocks of a slice from which on a call of the compiled code is shorter than the reference."""
_AT_ONCE = 1024
"""Blocks of a call per thread: Inductor keeps the moments of all of them, which then stay in the cache."""
_VARIANTS = 64
"""Limit of the graphs: dtypes of gradient and copy, whether there are copy and scale, and how many averages."""
_marked: set[tuple[torch.dtype | None, ...]] = set()
"""Variants with a marked call."""


def _update(
    w: Tensor, grad: Tensor, m_codes: Tensor, v_codes: Tensor, m_scales: Tensor, v_scales: Tensor, phase: Tensor,
    lane: Tensor, numbers: Tensor, scale: Tensor | None, copy: Tensor | None, averages: Sequence[Tensor],
    shares: Tensor | None,
) -> None:  # fmt: skip
    """Update whole blocks ``[blocks, BLOCK]`` in place; the arithmetic of ``adamw8bit_reference`` in its order."""
    beta1, beta1_rest, beta2, beta2_rest, shrink, rate, correction, eps = numbers.unbind()
    g = grad.to(torch.float32) if scale is None else grad.to(torch.float32) * scale
    code = m_codes.to(torch.float32)
    m = code.abs() * code * (m_scales[:, None] * (1.0 / LEVELS_M**2)) * beta1 + g * beta1_rest
    root = v_codes.to(torch.float32) * (v_scales[:, None] * (1.0 / LEVELS_V))
    root = (root * root * beta2 + g * beta2_rest * g).sqrt()
    m_scale, v_scale = m.abs().amax(1, keepdim=True), root.abs().amax(1, keepdim=True)
    words = phase[:, None] + lane
    place = (m.abs() * _factor(m_scale, LEVELS_M**2)).sqrt() + (words >> 16).to(torch.float32) * 2.0**-16 + 0.5
    m_codes.copy_(place.clamp(max=LEVELS_M).copysign(m).to(torch.int8))
    place = root * _factor(v_scale, LEVELS_V) + (words << 16 >> 16).to(torch.float32) * 2.0**-16 + 0.5
    v_codes.copy_(place.clamp(1, LEVELS_V).to(torch.uint8))
    m_scales.copy_(m_scale[:, 0])
    v_scales.copy_(v_scale[:, 0])
    new = w * shrink - m * rate / (root * correction + eps)
    w.copy_(new)
    if shares is not None:
        for index, average in enumerate(averages):
            average.copy_(averaged_reference(average, new, shares[index]))
    if copy is not None:
        copy.copy_(new)


def _factor(scales: Tensor, levels: int) -> Tensor:
    return scales.clamp(min=SMALLEST_SCALE).reciprocal() * levels


@cache
def _compiled() -> Callable[..., None]:
    limit = {"recompile_limit": _VARIANTS} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}
    compiled: Callable[..., None] = torch.compile(_update, fullgraph=True, **limit)  # type: ignore[call-overload]
    return compiled


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """The pieces of a flat tensor by what updates them."""

    whole: tuple[tuple[int, int, int], ...]
    """First piece, first element and number of whole blocks that follow one another."""
    rest: Blocks
    """All other pieces."""
    index: Tensor
    """Their indices among all pieces, int64."""


@lru_cache(maxsize=256)
def _parts(blocks: Blocks) -> _Parts:
    whole, others, piece = [], [], 0
    for part in blocks.slices:
        count, first = -(-(part.start + part.numel) // BLOCK) - part.start // BLOCK, -(-part.start // BLOCK)
        inside = max(0, (part.start + part.numel) // BLOCK - first)
        if inside < _FEWEST:
            others.append((part, range(piece, piece + count)))
        else:
            head = first * BLOCK - part.start
            whole.append((piece + (head > 0), part.offset + head, inside))
            others += _around(part, head, inside * BLOCK, piece, count)
        piece += count
    index = torch.tensor([i for _, pieces in others for i in pieces], dtype=torch.int64)
    return _Parts(tuple(whole), _restricted(blocks, tuple(part for part, _ in others), index), index)


def _around(part: Slice, head: int, body: int, piece: int, count: int) -> list[tuple[Slice, range]]:
    """The parts of a slice before and behind its whole blocks, each with its piece."""
    tail = part.numel - head - body
    found: list[tuple[Slice, range]] = []
    if head:
        found.append((Whole(part.name, head, part.start, part.offset), range(piece, piece + 1)))
    if tail:
        start, offset = part.start + head + body, part.offset + head + body
        found.append((Whole(part.name, tail, start, offset), range(piece + count - 1, piece + count)))
    return found


def _restricted(blocks: Blocks, slices: tuple[Slice, ...], index: Tensor) -> Blocks:
    """The blocks of some slices, with the phases and slots that they have among all."""
    found = build_blocks(slices, blocks.offsets.device)
    slots = torch.full((blocks.pieces,), -1, dtype=torch.int32)
    slots[blocks.others.long()] = blocks.slots
    own = slots[index]
    return replace(found, slots=own[found.others.long()], straddling=blocks.straddling)


def adamw8bit_compiled(
    param: Tensor, grad: Tensor, moments: Moments, blocks: Blocks, step: Step | DeviceStep, extras: Extras
) -> None:
    """``adamw8bit`` of fp32 parameters on a CPU.

    Raises:
        RuntimeError: it cannot be compiled here.
    """
    if why := unavailable():
        raise RuntimeError(f"adamw8bit, backend 'compile': {why}; use backend 'reference'")
    _step(param, grad, moments, blocks, step, extras)


def _step(
    param: Tensor, grad: Tensor, moments: Moments, blocks: Blocks, step: Step | DeviceStep, extras: Extras
) -> None:
    parts, lane = _parts(blocks), words_of_lanes(step.number, param.device)
    numbers = step.numbers if isinstance(step, DeviceStep) else torch.tensor(step.numbers, dtype=torch.float32)
    flats = (param, grad, moments.m_codes, moments.v_codes, extras.copy, *extras.averages)
    variant = (grad.dtype, *(None if t is None else t.dtype for t in (extras.grad_scale, *flats[4:])))
    shares = extras.shares if extras.averages else None
    for piece, first, count in (call for run in parts.whole for call in _calls(*run)):
        rows = [None if flat is None else flat.narrow(0, first, count * BLOCK).view(count, BLOCK) for flat in flats]
        scales = [of.narrow(0, piece, count) for of in (moments.m_scales, moments.v_scales, blocks.phases)]
        _any_number([*rows, *scales], variant)
        _compiled()(*rows[:4], *scales, lane, numbers, extras.grad_scale, rows[4], rows[5:], shares)
    if parts.index.numel():
        _step_rest(param, grad, moments, parts, step, extras)


def _calls(piece: int, first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Cut a run of whole blocks evenly, so that no call has only one, for which Dynamo has a graph of its own."""
    calls = -(-count // (_AT_ONCE * torch.get_num_threads()))
    bounds = [count * call // calls for call in range(calls + 1)]
    for begin, end in pairwise(bounds):
        yield piece + begin, first + begin * BLOCK, end - begin


def _any_number(tensors: list[Tensor | None], variant: tuple[torch.dtype | None, ...]) -> None:
    """Mark the number of blocks as one that varies, before the first call of a variant is compiled."""
    if variant in _marked:
        return
    from torch._dynamo import mark_dynamic

    _marked.add(variant)
    for tensor in tensors:
        if tensor is not None:
            mark_dynamic(tensor, 0)


def _step_rest(
    param: Tensor, grad: Tensor, moments: Moments, parts: _Parts, step: Step | DeviceStep, extras: Extras
) -> None:
    scales = replace(moments, m_scales=moments.m_scales[parts.index], v_scales=moments.v_scales[parts.index])
    adamw8bit_reference(param, grad, scales, parts.rest, step, extras)
    moments.m_scales[parts.index], moments.v_scales[parts.index] = scales.m_scales, scales.v_scales


@cache
def unavailable() -> str | None:
    """Compile it, and return the reason that it cannot be used here; None if it can. Takes some ten seconds once."""
    compiler = environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler ({compiler}); install g++, or set CXX"
    try:
        return None if _equals_reference() else "the compiled code differs from the reference"
    except Exception as error:  # of the compiler, of the linker, of missing headers
        return f"it does not compile here ({type(error).__name__}: {str(error).strip().splitlines()[0]})"


@torch.no_grad()
def _equals_reference() -> bool:
    """Whether two steps of some blocks are those of the reference to the bit."""
    # Inductor decides by the number of blocks whether to use all threads.
    numel = _AT_ONCE * torch.get_num_threads() * BLOCK
    blocks = build_blocks([Whole("tried", numel)], torch.device("cpu"))
    ours, theirs = (_trial(numel, blocks, way) for way in (_step, adamw8bit_reference))
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _trial(numel: int, blocks: Blocks, way: Callable[..., None]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    values: list[Any] = [torch.randn(numel, generator=generator) for _ in range(3)]
    codes = torch.zeros(numel, dtype=torch.int8), torch.zeros(numel, dtype=torch.uint8)
    moments = Moments(*codes, torch.zeros(blocks.pieces), torch.zeros(blocks.pieces))
    for number, grad in enumerate(values[1:], 1):
        step = Step(
            number=number, beta1=0.9, beta2=0.999, shrink=1 - 1e-5, rate=1e-3 / (1 - 0.9**number),
            correction=(1 - 0.999**number) ** -0.5, eps=1e-8,
        )  # fmt: skip
        way(values[0], grad, moments, blocks, step, Extras())
    return [values[0], moments.m_codes, moments.v_codes, moments.m_scales, moments.v_scales]
