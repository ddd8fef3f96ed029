"""Newton-Schulz iterations: the nearest semi-orthogonal matrix, about, without a decomposition."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby

import torch
from torch import Tensor

from fastdiff.config.optimizers.muon import ITERATIONS
from fastdiff.models.fused import Matrix

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of Jordan et al. 2024 (kellerjordan.github.io/posts/muon/): singular values of 0.01 to 1 become 0.68 to 1.14."""
EPS = 1e-7
"""Added to the norm."""


def orthogonalise(weight: Tensor, matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """Orthogonalise each of the matrices fused in a weight by itself.

    Args:
        weight: fp32 or bf16 ``[rows, columns]``.
        matrix: which there are.
        dtype: of the iterations, fp32 or bf16.

    Returns:
        ``[rows, columns]`` in this dtype.
    """
    grouped = weight.to(dtype).view(matrix.groups, -1, matrix.columns)
    done = torch.empty_like(grouped)
    start = 0
    for height, equal in groupby(matrix.heights):
        count = len(list(equal))
        end = start + count * height
        shape = matrix.groups, count, height, matrix.columns
        parts = grouped[:, start:end].reshape(shape).transpose(0, 1)  # [count, groups, height, columns]
        found = newton_schulz(parts.reshape(count, matrix.groups * height, matrix.columns))
        done[:, start:end] = found.reshape(parts.shape).transpose(0, 1).flatten(1, 2)
        start = end
    return done.view(-1, matrix.columns)


def newton_schulz(matrices: Tensor) -> Tensor:
    """Orthogonalise matrices ``[N, rows, columns]``, fp32 or bf16, in their dtype; products add up in fp32.

    A is X Xᵀ of the wide matrix divided by its Frobenius norm, and X becomes ``aX + (bA + cA²)X``, each sum rounded
    once, as ``torch.optim.Muon`` does.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    exact = x.float()
    norms = torch.linalg.vector_norm(exact, dim=(1, 2), keepdim=True)
    x = (exact / (norms + EPS)).to(x.dtype).contiguous()
    with _exact_products():
        for _ in range(ITERATIONS):
            gram = _product(x, x.mT)
            x = _product(_product(gram, gram, gram, b, c), x, x, a)
    return x.mT if tall else x


def _product(left: Tensor, right: Tensor, plus: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    """``beta * plus + alpha * left @ right``, added up in fp32 and rounded once."""
    dtype = left.dtype
    if left.device.type == "cpu":  # kernels of processors differ in how they add up bf16
        left, right, plus = left.float(), right.float(), None if plus is None else plus.float()
    if plus is None:
        return torch.bmm(left, right).to(dtype)
    return torch.baddbmm(plus, left, right, beta=beta, alpha=alpha).to(dtype)


@contextmanager
def _exact_products() -> Iterator[None]:
    """Let no product on a GPU round its operands to TF32 or its partial sums to bf16."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_tf32, settings.allow_bf16_reduced_precision_reduction
    settings.allow_tf32, settings.allow_bf16_reduced_precision_reduction = False, False
    try:
        yield
    finally:
        settings.allow_tf32, settings.allow_bf16_reduced_precision_reduction = before
