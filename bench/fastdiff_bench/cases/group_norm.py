"""Group normalization at the shapes of Stable Diffusion 1.5 (64x64 latents) and IDDPM; 32 groups, smaller batch."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff_bench.cases.case import Case, Inputs, Outputs, elements
from fastdiff_kernels.group_norm import group_norm, group_norm_reference
from fastdiff_kernels.names import Backend

_BATCH = 64
_GROUPS = 32


_EXTRA = {"": 0, "shift": 1, "residual": 1, "per-sample": 0}
_EXTRA_BACKWARD = {"": 0, "shift": 2, "residual": 1, "per-sample": 0}


def _forward_operations(silu: bool, extra: str) -> int:
    """Count operations per element: mean 1, centred 1, variance 2, scale and bias 2; SiLU 3; added input 1."""
    return 6 + 3 * silu + _EXTRA[extra]


def _backward_operations(silu: bool, extra: str) -> int:
    """Count operations per element: sums for weight and bias (and thus for the group) 3, gradient 4.

    SiLU: its argument 2, sigmoid 3, derivative 4, product 1. Shift: h again 1, sum 1. Residual: gradient of h 1.
    """
    return 7 + 10 * silu + _EXTRA_BACKWARD[extra]


def _liger(inputs: Inputs) -> Callable[[], Tensor]:
    from liger_kernel.ops.group_norm import LigerGroupNormFunction

    x, weight, bias = inputs["x"], inputs["weight"], inputs["bias"]
    return lambda: F.silu(LigerGroupNormFunction.apply(x, weight, bias, x.shape[1], _GROUPS, 1e-5))


def _case(
    shape: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16, extra: str = "", silu: bool = True,
    memory: torch.memory_format = torch.channels_last,
) -> Case:  # fmt: skip
    samples, channels, side = shape

    def parameter(samples: int, device: str) -> Tensor:
        size = (samples, channels) if extra == "per-sample" else (channels,)
        return torch.randn(size, device=device).requires_grad_()

    def build(device: str, samples: int = samples) -> Inputs:
        def image() -> Tensor:
            image = torch.randn(samples, channels, side, side, device=device, dtype=dtype)
            return image.to(memory_format=memory).requires_grad_()

        inputs: Inputs = {"x": image(), "weight": parameter(samples, device), "bias": parameter(samples, device)}
        if extra == "shift":
            inputs["shift"] = torch.randn(samples, channels, device=device, dtype=dtype).requires_grad_()
        if extra == "residual":
            inputs["residual"] = image()
        return inputs

    def call(inputs: Inputs, backend: Backend) -> Tensor | Sequence[Tensor]:
        return group_norm(groups=_GROUPS, silu=silu, backend=backend, **inputs)

    def exact(inputs: Inputs) -> Outputs:
        return group_norm_reference(groups=_GROUPS, silu=silu, **inputs)

    order = "nhwc" if memory == torch.channels_last else "nchw"
    name = "-".join(filter(None, [f"{channels}x{side}x{side}", order, extra, "" if silu else "linear"]))
    return Case(
        op="group_norm",
        shape=name,
        dtype=dtype,
        build=build,
        build_large=partial(build, samples=_BATCH),
        call=call,
        exact=exact,
        sums=("dweight", "dbias", *(["dshift"] if extra == "shift" else [])),
        # The sum and three gradients or outputs: both summands share one gradient.
        backward_bytes=(lambda inputs: 4 * inputs["x"].nbytes) if extra == "residual" else None,
        forward_operations=elements("x", _forward_operations(silu, extra)),
        backward_operations=elements("x", _backward_operations(silu, extra)),
        other_libraries={"liger": _liger} if silu and not extra and order == "nchw" else {},
    )


CASES = [
    _case((2, 320, 64)),
    _case((1, 960, 64)),
    _case((2, 640, 32)),
    _case((2, 1920, 16)),
    _case((4, 1280, 16)),
    _case((16, 1280, 8)),
    _case((2, 320, 64), torch.float32),
    _case((4, 1280, 16), torch.float32),
    _case((2, 320, 64), torch.float16),
    _case((2, 320, 64), memory=torch.contiguous_format),
    _case((4, 1280, 16), memory=torch.contiguous_format),
    _case((2, 320, 64), extra="shift"),
    _case((4, 1280, 16), extra="shift"),
    _case((2, 320, 64), extra="residual"),
    _case((4, 1280, 16), extra="residual"),
    _case((2, 320, 64), silu=False),
    _case((2, 128, 64), extra="per-sample"),
    _case((4, 384, 16), extra="per-sample"),
    _case((16, 512, 8), extra="per-sample"),
]
