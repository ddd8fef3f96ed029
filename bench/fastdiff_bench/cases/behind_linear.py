"""Cases of ops behind a linear layer: ``u`` contains its bias, and the backward pass sums the gradient of that bias."""

from collections.abc import Callable
from functools import partial

import torch

from fastdiff_bench.cases.case import Case, Inputs, Outputs, elements
from fastdiff_kernels.names import Backend


def _inputs(device: str, shape: tuple[int, ...], dtype: torch.dtype, samples: int) -> Inputs:
    shapes = {"u": (samples, *shape), "bias": (torch.Size(shape[1:]).numel(),)}
    return {n: torch.randn(s, dtype=dtype, device=device).requires_grad_() for n, s in shapes.items()}


def behind_linear(
    function: Callable[..., Outputs],
    *,
    op: str,
    chosen_as: str,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    samples: tuple[int, int],
    halves: tuple[int, int],
    operations: tuple[int, int],
) -> Case:
    """Return a case.

    Args:
        function: the op, of ``u`` and ``bias``.
        op: as in ``Case``, and so is chosen_as.
        chosen_as: see ``op``.
        name: of the shape.
        shape: of ``u`` without samples: tokens and channels.
        dtype: of all tensors.
        samples: of a small and of a large case.
        halves: of ``u``, by bytes, that the forward and the backward pass move at least; nothing reads the bias.
        operations: of the forward and the backward pass per element of ``u``.
    """
    build = partial(_inputs, shape=shape, dtype=dtype)

    def call(inputs: Inputs, backend: Backend) -> Outputs:
        return function(inputs["u"], inputs["bias"], backend=backend)

    return Case(
        op=op,
        chosen_as=chosen_as,
        shape=name,
        dtype=dtype,
        build=partial(build, samples=samples[0]),
        build_large=partial(build, samples=samples[1]),
        call=call,
        sums=("dbias",),
        forward_bytes=lambda i: halves[0] * int(i["u"].nbytes) // 2,
        backward_bytes=lambda i: halves[1] * int(i["u"].nbytes) // 2 + int(i["bias"].nbytes),
        forward_operations=elements("u", operations[0]),
        backward_operations=elements("u", operations[1]),
    )
