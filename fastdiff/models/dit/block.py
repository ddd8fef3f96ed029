"""The block of a DiT: sub-layers that take the norm of the residual stream and add their output to it."""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor, nn

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.models.blockwise import is_compiled
from fastdiff.models.dit.attention import Attention
from fastdiff.models.dit.mlp import MLPS
from fastdiff.models.dit.modulation import MODULATIONS
from fastdiff.models.dit.norm import ModulatedNorm
from fastdiff_kernels import dispatch
from fastdiff_kernels.adaln import Modulation, gated_residual
from fastdiff_kernels.names import AttentionBackend


class DiTBlock(nn.Module):
    """Transformer block: attention and MLP, each modulated and gated by the condition (adaLN-Zero, figure 3).

    The unit of ``torch.compile``, of recomputation and of ZeRO-3's gathering.

    Args:
        config: of the network.
        number: of the block, from 0.
        attention: implementation.
    """

    def __init__(self, config: DiTConfig, number: int, attention: AttentionBackend = "auto") -> None:
        super().__init__()
        self.gives_value = config.value_residual and number == 0
        self.norm1 = ModulatedNorm(config)
        self.attn = Attention(config, number, attention)
        self.norm2 = ModulatedNorm(config)
        self.mlp = MLPS[config.mlp](config.hidden, config.inner)
        self.adaLN_modulation = MODULATIONS[config.modulation].of_layer(config.hidden, 6)

    def forward(
        self,
        tokens: Tensor,
        condition: Tensor,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        first_value: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Map tokens ``[B, T, D]`` to tokens.

        Args:
            tokens: ``[B, T, D]``.
            condition: ``[B, D]``, or the shared modulations ``[B, 6 * D]``.
            cos: of the rotation of queries and keys, see ``rotary_table``; None: without.
            sin: likewise.
            first_value: values of block 0, ``[B, H, T, d]``, with ``--model.value_residual``.

        Returns:
            ``[B, T, D]``; block 0 of a network with ``--model.value_residual`` also its values.
        """
        stream = Stream(tokens, Modulation(self.adaLN_modulation(condition)))
        branch, bias, value = self.attn(stream.normed(self.norm1), cos, sin, first_value)
        stream.add(branch, bias)
        stream.add(*self.mlp(stream.normed(self.norm2)))
        return (stream.end(), value) if self.gives_value else stream.end()

    def choices(self, example: Tensor) -> Iterator[dispatch.Choice]:
        """Yield the choice of its adaLN ops, which are alike; see ``fastdiff_kernels.dispatch.Explains``."""
        chosen = dispatch.choice("adaln", example)
        if is_compiled(self) and chosen.forward != "triton":
            compiled = "compile (Inductor)"
            chosen = replace(chosen, forward=compiled, backward=compiled, why=f"{chosen.why}; in a compiled block")
        yield chosen


class Stream:
    """The residual stream of a block. An output waits until the next norm, whose op adds it; ``end`` adds the last.

    Args:
        tokens: ``[B, T, D]``.
        modulation: shift, scale and gate of each sub-layer, in their order.
    """

    def __init__(self, tokens: Tensor, modulation: Modulation) -> None:
        self._tokens, self._modulation = tokens, modulation
        self._branch: Tensor | None = None
        self._bias: Tensor | None = None

    def normed(self, norm: ModulatedNorm) -> Tensor:
        """Return the modulated norm of the stream, ``[B, T, D]``."""
        if self._branch is None:
            self._tokens, y = norm.residual(self._tokens, self._modulation)
        else:
            self._tokens, y = norm.gated(self._tokens, self._branch, self._modulation, self._bias)
        self._branch = self._bias = None
        return y

    def add(self, branch: Tensor, bias: Tensor | None) -> None:
        """Add the output ``[B, T, D]`` of a sub-layer, and the bias ``[D]`` of its last layer, by the next gate."""
        self._branch, self._bias = branch, bias

    def end(self) -> Tensor:
        """Return the tokens, ``[B, T, D]``, with the last output."""
        assert self._branch is not None
        return gated_residual(self._tokens, self._branch, self._modulation, bias=self._bias)
