"""One optimizer step over a flat tensor with the parameters of DiT-XL/2, whole or partitioned by ZeRO."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from fastdiff_bench.cases.case import Case, Inputs, elements
from fastdiff_bench.cases.philox import WORD
from fastdiff_kernels.adamw8bit.blocks import Blocks, Whole, build_blocks
from fastdiff_kernels.adamw8bit.kernels import adamw8bit, largest
from fastdiff_kernels.adamw8bit.reference import DeviceStep, Extras, Moments, Step
from fastdiff_kernels.names import Backend

_WIDTH = 1152
_SIZES = (_WIDTH * _WIDTH, _WIDTH, 16 * _WIDTH, 6 * _WIDTH)
_TIMES_LARGE = 63  # odd, so that the last block of the second is half a block, as in the model
_STEP = Step(number=10, beta1=0.9, beta2=0.999, shrink=1 - 1e-6, rate=1e-4 / (1 - 0.9**10), correction=10.0, eps=1e-8)


def _blocks(device: str, cut: int, times: int) -> Blocks:
    """Lay out the parameters one after the other; the first lacks ``cut`` elements, which another rank holds."""
    slices, offset = [], 0
    for index, size in enumerate(_SIZES):
        start = cut if index == 0 else 0
        numel = times * size - start
        slices.append(Whole(f"p{index}", numel, start, offset))
        offset += numel
    return build_blocks(slices, torch.device(device), [("p0", 0)] if cut else [])


def _build(
    param: torch.dtype, grad: torch.dtype, *, averages: int, cut: int, times: int = 1
) -> Callable[[str], Inputs]:
    def build(device: str) -> Inputs:
        blocks = _blocks(device, cut, times)
        numel = sum(s.numel for s in blocks.slices)
        moments = Moments(
            torch.zeros(numel, dtype=torch.int8, device=device),
            torch.zeros(numel, dtype=torch.uint8, device=device),
            torch.zeros(blocks.pieces, device=device),
            torch.zeros(blocks.pieces, device=device),
        )
        return {
            "param": torch.randn(numel, device=device).to(param),
            "grad": torch.randn(numel, device=device).to(grad),
            "moments": moments,
            "blocks": blocks,
            "scale": torch.ones((), device=device),
            "copy": torch.empty(numel, dtype=torch.bfloat16, device=device) if averages else None,
            "averages": [torch.zeros(numel, device=device) for _ in range(averages)],
            "shares": torch.full((averages,), 1e-3, device=device),
            # As in a CUDA graph, where the step is decided on the device.
            "number": torch.tensor(_STEP.number, device=device) if averages > 1 else None,
            "numbers": torch.tensor(_STEP.numbers, device=device),
            "skip": torch.tensor(False, device=device) if averages > 1 else None,
        }

    return build


def _call(inputs: Inputs, backend: Backend) -> Tensor:
    param, grad, moments, blocks, scale = (inputs[k] for k in ("param", "grad", "moments", "blocks", "scale"))
    shared = largest(grad, moments, blocks, _STEP, scale, backend) if blocks.straddling else None
    given = {name: inputs[name] for name in ("copy", "averages", "shares", "skip")}
    number = inputs["number"]
    step = _STEP if number is None else DeviceStep(number=number, numbers=inputs["numbers"])
    adamw8bit(param, grad, moments, blocks, step, Extras(grad_scale=scale, shared=shared, **given), backend)
    result: Tensor = param
    return result


def _optimizer(build: Callable[[nn.Parameter], Any]) -> Callable[[Inputs], Callable[[], tuple[()]]]:
    """Prepare another optimizer; its moments have another encoding, so its outputs cannot be compared.

    PyTorch accepts a gradient only in the dtype of its parameter.
    """

    def prepare(inputs: Inputs) -> Callable[[], tuple[()]]:
        parameter = nn.Parameter(inputs["param"])
        parameter.grad = inputs["grad"]
        optimizer = build(parameter)

        def step() -> tuple[()]:
            optimizer.step()
            return ()

        return step

    return prepare


_OTHER_LIBRARIES = {
    "bitsandbytes": _optimizer(lambda p: import_module("bitsandbytes.optim").AdamW8bit([p], lr=1e-4)),
    "torchao": _optimizer(lambda p: import_module("torchao.optim").AdamW8bit([p], lr=1e-4)),
    "fp32 AdamW": _optimizer(lambda p: torch.optim.AdamW([p], lr=1e-4, fused=True)),
}


def _exact(inputs: Inputs) -> Tensor:
    """Return the parameters after one step from zero moments."""
    grad: Tensor = inputs["grad"] * inputs["scale"]
    m, root = (1 - _STEP.beta1) * grad, (1 - _STEP.beta2) ** 0.5 * grad.abs()
    result: Tensor = inputs["param"] * _STEP.shrink - _STEP.rate * m / (root * _STEP.correction + _STEP.eps)
    return result


def _bytes(inputs: Inputs) -> int:
    """Count bytes: parameters, codes, scales and average read and written, gradient and table read, copy written."""
    param, grad, blocks, moments = (inputs[name] for name in ("param", "grad", "blocks", "moments"))
    both = [param, *inputs["averages"], moments.m_codes, moments.v_codes, moments.m_scales, moments.v_scales]
    table = [blocks.offsets, blocks.phases, blocks.aligned, blocks.others, blocks.lanes, blocks.lengths]
    once = [grad, inputs["copy"], *table]
    return sum(int(t.nbytes) for t in (*both, *both, *once) if t is not None)


def _operations(param: torch.dtype, averages: int) -> int:
    """Count operations per element: gradient 1, m 5, v 6, its root 1, largest 2, parameter 6, codes and dither 11.

    Average 3; rounding of a bf16 parameter: a random word, an addition and a mask.
    """
    return 32 + 3 * averages + (WORD + 2) * (param == torch.bfloat16)


CASES = [
    Case(
        op="adamw8bit",
        shape=shape,
        dtype=grad,
        call=_call,
        exact=_exact,
        forward_bytes=_bytes,
        forward_operations=elements("param", _operations(param, averages)),
        narrow=("_adamw8bit_masked_kernel", "_adamw8bit_largest_kernel"),
        build=_build(param, grad, averages=averages, cut=cut),
        build_large=_build(param, grad, averages=averages, cut=cut, times=_TIMES_LARGE),
        other_libraries=_OTHER_LIBRARIES if param == grad and not averages and not cut else {},
    )
    for shape, param, grad, averages, cut in (
        ("DiT-XL-fp32-copy-ema", torch.float32, torch.bfloat16, 1, 0),
        ("DiT-XL-fp32-copy-2-emas-device", torch.float32, torch.bfloat16, 2, 0),
        ("DiT-XL-fp32", torch.float32, torch.float32, 0, 0),
        ("DiT-XL-fp32-straddling", torch.float32, torch.float32, 0, 80),
        # The usual layout of a ZeRO-1 or ZeRO-2 rank: no block at a multiple of 16.
        ("DiT-XL-fp32-unaligned", torch.float32, torch.float32, 0, 82),
        ("DiT-XL-fp32-fp16-grad", torch.float32, torch.float16, 0, 0),
        ("DiT-XL-bf16", torch.bfloat16, torch.bfloat16, 0, 0),
    )
]
