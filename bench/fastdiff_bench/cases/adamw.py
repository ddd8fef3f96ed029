"""One optimizer step over a flat tensor, with the norm of its gradient, and the norm alone."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fastdiff_bench.cases.case import Case, Inputs, elements
from fastdiff_kernels.adamw import adamw, step_numbers
from fastdiff_kernels.adamw.norm import clip, norm
from fastdiff_kernels.names import Backend

_NUMEL = 256 * 1152
_NUMEL_NORM = 18 * _NUMEL
"""So many that a program of the norm adds up more than one block."""
_NUMEL_LARGE = 675_129_632
"""Parameters of DiT-XL/2."""
_NUMBERS = step_numbers(10, 1e-4, (0.9, 0.999), 1e-8, 0.01)
_SHARES = (1e-3, 1e-4, 0.5)


def _build(grad: torch.dtype, averages: int, *, copied: bool, numel: int = _NUMEL) -> Callable[[str], Inputs]:
    def build(device: str) -> Inputs:
        return {
            "param": torch.randn(numel, device=device),
            "grad": torch.randn(numel, device=device).to(grad),
            "m": torch.zeros(numel, device=device),
            "v": torch.zeros(numel, device=device),
            "numbers": torch.tensor(_NUMBERS, device=device),
            "copy": torch.empty(numel, dtype=torch.bfloat16, device=device) if copied else None,
            "averages": [torch.zeros(numel, device=device) for _ in range(averages)],
            "shares": torch.tensor(_SHARES[:averages], device=device),
        }

    return build


def _call(inputs: Inputs, backend: Backend) -> tuple[Tensor, Tensor]:
    """Return the norm and the new parameters."""
    length = norm(inputs["grad"], backend)
    scale, skip = clip(length, 1.0)
    adamw(**inputs, grad_scale=scale, skip=skip, backend=backend)
    return length, inputs["param"]


def _exact(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return the norm and the parameters after one step from zero moments."""
    _, beta1_rest, _, beta2_rest, decay, rate, correction, eps = _NUMBERS
    length = inputs["grad"].square().sum().sqrt()
    grad = inputs["grad"] * clip(length, 1.0)[0]
    update = rate * beta1_rest * grad / (beta2_rest**0.5 * grad.abs() * correction + eps)
    return length, inputs["param"] * (1 - decay) - update


def _bytes(inputs: Inputs) -> int:
    """Count bytes: parameters, moments and averages read and written, gradient read twice, copy written."""
    both = [inputs["param"], inputs["m"], inputs["v"], *inputs["averages"]]
    twice, copied = sum(int(t.nbytes) for t in (*both, inputs["grad"])), inputs["copy"]
    return 2 * twice + (0 if copied is None else int(copied.nbytes))


def _fused_adamw(inputs: Inputs) -> Callable[[], tuple[()]]:
    """Prepare torch's clipping and fused AdamW, and averages and a copy in passes of their own."""
    parameter = nn.Parameter(inputs["param"])
    parameter.grad = inputs["grad"].to(torch.float32)
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, fused=True)
    averages, copied = inputs["averages"], inputs["copy"]

    def step() -> tuple[()]:
        nn.utils.clip_grad_norm_(parameter, 1.0)
        optimizer.step()
        for average, share in zip(averages, _SHARES, strict=False):
            average.lerp_(parameter.detach(), share)
        if copied is not None:
            copied.copy_(parameter.detach())
        return ()

    return step


def _gradient(numel: int) -> Callable[[str], Inputs]:
    return lambda device: {"grad": torch.randn(numel, device=device).bfloat16()}


CASES = [
    *(
        Case(
            op="adamw",
            shape=shape,
            dtype=grad,
            call=_call,
            exact=_exact,
            forward_bytes=_bytes,
            # Norm 2, gradient 1, m 3, v 4, its root 1, parameter 7, and 3 for each average.
            forward_operations=elements("param", 18 + 3 * averages),
            build=_build(grad, averages, copied=copied),
            build_large=_build(grad, averages, copied=copied, numel=_NUMEL_LARGE),
            other_libraries={"torch": _fused_adamw},
        )
        for shape, grad, averages, copied in (
            ("DiT-XL-copy-ema", torch.bfloat16, 1, True),
            ("DiT-XL-copy-3-emas", torch.bfloat16, 3, True),
            ("DiT-XL-ema", torch.float32, 1, False),
            ("DiT-XL-copy", torch.float32, 0, True),
        )
    ),
    Case(
        op="adamw",
        shape="DiT-XL-norm",
        dtype=torch.bfloat16,
        call=lambda inputs, backend: norm(inputs["grad"], backend),
        exact=lambda inputs: inputs["grad"].square().sum().sqrt(),
        forward_operations=elements("grad", 2),
        build=_gradient(_NUMEL_NORM),
        build_large=_gradient(_NUMEL_LARGE),
    ),
]
