"""Self-attention of a block."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.models.linear import summed_later, without_bias
from fastdiff_kernels import dispatch
from fastdiff_kernels.bias_gradient import unpacked
from fastdiff_kernels.names import AttentionBackend
from fastdiff_kernels.packed_attention import attended, packed_attention, packed_choice
from fastdiff_kernels.rotary import Rotary, rotated_parts


class HeadNorm(nn.Module):
    """The weight of the RMSNorm of the queries or keys of every head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        nn.init.ones_(self.weight)


class Attention(nn.Module):
    """Multi-head self-attention over all tokens; query, key and value come from one packed projection.

    Args:
        config: of the network.
        block: number of its block, from 0.
        backend: implementation.
    """

    v1_lambda: nn.Parameter | None
    """Share of the values of block 0, ``[1]``; None: they are not mixed in."""

    def __init__(self, config: DiTConfig, block: int, backend: AttentionBackend = "auto") -> None:
        super().__init__()
        self.heads, self.length, self.backend = config.heads, config.tokens(block), backend
        self.eps = config.qk_norm_eps
        width = config.heads * config.head_width
        self.qkv = nn.Linear(config.hidden, 3 * width)
        self.proj = nn.Linear(width, config.hidden)
        self.q_norm = HeadNorm(config.head_width) if config.qk_norm else None
        self.k_norm = HeadNorm(config.head_width) if config.qk_norm else None
        mixes = config.value_residual and block > 0
        self.register_parameter("v1_lambda", nn.Parameter(torch.empty(1)) if mixes else None)
        if self.v1_lambda is not None:
            nn.init.constant_(self.v1_lambda, 0.5)
        self.uses_values = config.value_residual

    def forward(
        self, tokens: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, first_value: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Attend, and return the bias that is to be added (``without_bias``) and, with several uses, the values.

        Args:
            tokens: ``[B, T, D]``.
            cos: of the rotation, see ``rotary_table``; None: without.
            sin: likewise.
            first_value: values of block 0, ``[B, H, T, d]``, for a later block that mixes them in.

        Returns:
            ``[B, T, D]``; the bias; the values ``[B, H, T, d]``, before ``first_value`` is mixed in.
        """
        projected, bias = summed_later(self.qkv, tokens, "adaln")
        packed = projected.view(*tokens.shape[:2], 3, self.heads, -1)
        rotary = self._rotary(cos, sin)
        if not self.uses_values:
            return *without_bias(
                self.proj, packed_attention(packed, bias=bias, rotary=rotary, backend=self.backend)
            ), None
        query, key, value = _parts(packed, rotary, bias)
        mixed = value
        if self.v1_lambda is not None and first_value is not None:
            mixed = torch.lerp(value, first_value, self.v1_lambda)
        return *without_bias(self.proj, attended((query, key, mixed), self.backend)), value

    def _rotary(self, cos: Tensor | None, sin: Tensor | None) -> Rotary | None:
        if self.q_norm is None or self.k_norm is None:
            return None if cos is None else Rotary(cos, sin)
        return Rotary(cos, sin, self.q_norm.weight, self.k_norm.weight, self.eps)

    def choices(self, example: Tensor) -> Iterator[dispatch.Choice]:
        """Yield the choice of its attention; see ``fastdiff_kernels.dispatch.Explains``."""
        yield packed_choice(self.proj.in_features // self.heads, self.length, example, self.backend)


def _parts(packed: Tensor, rotary: Rotary | None, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Queries, keys and values ``[B, H, T, d]`` of a packed projection, which sum the gradient of its bias."""
    if rotary is not None:
        return rotated_parts(packed, *rotary, bias=bias)
    return packed.permute(2, 0, 3, 1, 4).unbind(0) if bias is None else unpacked(packed, bias)
