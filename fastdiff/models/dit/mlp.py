"""The MLP of a block: two linear layers with GELU between them, or SwiGLU."""

from torch import Tensor, nn

from fastdiff.models.linear import summed_later, without_bias
from fastdiff_kernels.gelu import gelu
from fastdiff_kernels.swiglu import swiglu


class Mlp(nn.Module):
    """Two linear layers with the tanh form of GELU between them."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden, inner)
        self.fc2 = nn.Linear(inner, hidden)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[B, T, D] -> [B, T, D]``, and the bias that is to be added, see ``without_bias``."""
        inner, bias = summed_later(self.fc1, tokens, "adaln")
        return without_bias(self.fc2, gelu(inner, bias))


class SwiGlu(nn.Module):
    """``w3(silu(a) * b)`` with ``a, b = w12(x)`` (Shazeer 2020, arXiv:2002.05202, eq. 6, with biases)."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.w12 = nn.Linear(hidden, 2 * inner)
        self.w3 = nn.Linear(inner, hidden)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[B, T, D] -> [B, T, D]``, and the bias that is to be added, see ``without_bias``."""
        halves, bias = summed_later(self.w12, tokens, "adaln")
        return without_bias(self.w3, swiglu(halves, bias))


MLPS: dict[str, type[Mlp] | type[SwiGlu]] = {"gelu": Mlp, "swiglu": SwiGlu}
"""By ``--model.mlp``."""
