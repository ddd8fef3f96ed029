"""The block of a DiT whose linear layers multiply in FP8.

It computes what ``DiTBlock`` does, in two functions with the attention between them. Their forward and backward passes
are written out, because an operand in FP8 is a pair of tensors without gradients of their own: the op in front of a
product writes it, in both passes (``fastdiff_kernels.fp8``). Without gradients (validation, sampling) the block is a
``DiTBlock`` in 16 bits, as the exported network is.
"""

from dataclasses import replace
from typing import Any
from typing import cast as typed

import torch
from torch import Tensor, nn

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.models.delayed_scales import GRADIENT, INPUT, WEIGHT, Forms, LayerScales
from fastdiff.models.dit.block import DiTBlock
from fastdiff.models.dit.mlp import Mlp
from fastdiff_kernels.fp8.adaln import gate_backward, gated_norm, gated_norm_backward, norm, norm_backward
from fastdiff_kernels.fp8.cast import cast
from fastdiff_kernels.fp8.gelu import gelu, gelu_backward
from fastdiff_kernels.fp8.join import join, join_packed
from fastdiff_kernels.fp8.products import input_gradient, output, weight_gradient
from fastdiff_kernels.fp8.values import Kept, folded
from fastdiff_kernels.names import AttentionBackend
from fastdiff_kernels.packed_attention import attended, projected

_NORM_EPS = 1e-6


class Fp8DiTBlock(DiTBlock):
    """A ``DiTBlock`` with scales, which ``fastdiff.models.fp8.convert`` makes of one."""

    scales: tuple[LayerScales, LayerScales]
    """Of the layer before the attention, and of the three behind."""

    @staticmethod
    def layers(block: DiTBlock) -> tuple[list[nn.Linear], list[nn.Linear]]:
        """Return the layers that multiply in FP8, before the attention and behind it."""
        mlp = typed(Mlp, block.mlp)
        return [block.attn.qkv], [block.attn.proj, mlp.fc1, mlp.fc2]

    @staticmethod
    def rows(block: DiTBlock) -> int:
        """Return the tokens per sample."""
        return block.attn.length

    @staticmethod
    def problem(config: DiTConfig) -> str | None:
        """Return what the blocks of a network have that those in FP8 lack; None: nothing."""
        options = replace(config, base_width=0).options
        if not options and config.route is not None:
            return f"blocks in FP8 take all tokens, this network has --model.routing {config.routing}"
        return f"blocks in FP8 are those of the published DiT, this network has {options}" if options else None

    def forward(
        self,
        tokens: Tensor,
        condition: Tensor,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        first_value: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``tokens [B, T, D], condition [B, D] -> [B, T, D]``; ``problem`` excludes the other arguments."""
        if not torch.is_grad_enabled():
            return super().forward(tokens, condition)
        width, heads, backend = tokens.shape[2], self.attn.heads, self.attn.backend
        first, rest = self.adaLN_modulation(condition).split((2 * width, 4 * width), dim=1)  # [B, 2D], [B, 4D]
        before, behind = self.scales
        (qkv,), others = self.layers(self)
        tokens, *parts = _NormAndProduct.apply(  # type: ignore[no-untyped-call]
            tokens, first, qkv.weight, qkv.bias, before.units, before.probe, before.forms, heads, backend
        )
        mixed = attended(parts, backend)
        parameters = [parameter for layer in others for parameter in (layer.weight, layer.bias)]
        out: Tensor = _AfterAttention.apply(mixed, tokens, rest, *parameters, behind.units, behind.probe, behind.forms)  # type: ignore[no-untyped-call]
        return out


class _NormAndProduct(torch.autograd.Function):
    """The modulated norm and the packed projection ``qkv``; beside it the tokens, as the residual stream."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, modulations: Tensor, weight: Tensor, bias: Tensor, units: Tensor, probe: Tensor,
        forms: Forms, heads: int, backend: AttentionBackend,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        normed = norm(tokens, modulations, _NORM_EPS, units[0, INPUT], forms.operand)
        w = cast(weight, units[0, WEIGHT], forms.weight)
        qkv = output(normed.y, w, bias).view(*tokens.shape[:2], 3, heads, -1)
        maxima = folded([normed.y.maxima, w.maxima])
        ctx.save_for_backward(
            tokens, modulations, normed.mean, normed.rstd, normed.y.columns, normed.y.plain, weight, units, maxima
        )
        ctx.forms = forms
        return (tokens.view_as(tokens), *projected(qkv, backend))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        tokens, modulations, mean, rstd, *y, weight, units, maxima = ctx.saved_tensors
        dtokens, *parts = upstream
        unit, form = units[0, GRADIENT], ctx.forms.operand
        is_packed = len(parts) == 1
        du, dbias = join_packed(parts[0], unit, form) if is_packed else join(parts[0], parts[1], parts[2], unit, form)
        dweight = weight_gradient(du, Kept(y[0], y[1], units[0, INPUT]))
        dy = input_gradient(du, cast(weight, units[0, WEIGHT], ctx.forms.turned_weight))
        dx, dmodulations = norm_backward(dy.view_as(tokens), dtokens, tokens, modulations, mean, rstd)
        seen = torch.cat([maxima, folded([du.maxima])]).view_as(units)
        return dx, dmodulations, dweight, dbias, None, seen, None, None, None


class _AfterAttention(torch.autograd.Function):
    """All behind the attention: its projection, the gated norm, the MLP and its gate."""

    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, tokens: Tensor, modulations: Tensor, w_proj: Tensor, b_proj: Tensor, w_in: Tensor,
        b_in: Tensor, w_out: Tensor, b_out: Tensor, units: Tensor, probe: Tensor, forms: Forms,
    ) -> Tensor:  # fmt: skip
        proj, fc1, fc2 = units.unbind(0)
        weights = [
            cast(weight, unit[WEIGHT], forms.weight) for weight, unit in ((w_proj, proj), (w_in, fc1), (w_out, fc2))
        ]
        x = cast(mixed.flatten(0, 1), proj[INPUT], forms.operand)
        branch = output(x, weights[0]).view_as(tokens)
        normed = gated_norm(tokens, branch, b_proj, modulations, _NORM_EPS, fc1[INPUT], forms.operand)
        u = output(normed.y, weights[1], b_in)  # [B * T, 4D]
        inner = gelu(u, fc2[INPUT], forms.operand)
        last = output(inner, weights[2]).view_as(tokens)
        operands = [x, normed.y, inner]
        maxima = folded([operand.maxima for pair in zip(operands, weights, strict=True) for operand in pair])
        ctx.save_for_backward(
            tokens, branch, b_proj, normed.mean, normed.rstd, u, last, b_out, modulations, w_proj, w_in, w_out,
            units, maxima, *(tensor for operand in operands for tensor in (operand.columns, operand.plain)),
        )  # fmt: skip
        ctx.forms = forms
        gate_out = modulations[:, -tokens.shape[2] :]  # [B, D]
        return normed.h + gate_out.unsqueeze(1) * last + (gate_out * b_out).unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (
            tokens, branch, b_proj, mean, rstd, u, last, b_out, modulations, w_proj, w_in, w_out,
            units, maxima, *operands,
        ) = ctx.saved_tensors  # fmt: skip
        (dout,), forms = upstream, ctx.forms
        proj, fc1, fc2 = units.unbind(0)
        x, y, inner = (Kept(operands[2 * n], operands[2 * n + 1], units[n, INPUT]) for n in range(3))
        out = gate_backward(dout, last, b_out, modulations, fc2[GRADIENT], forms.operand)
        dw_out = weight_gradient(out.dbranch, inner)
        dinner = input_gradient(out.dbranch, cast(w_out, fc2[WEIGHT], forms.turned_weight))
        du, db_in = gelu_backward(dinner, u, fc1[GRADIENT], forms.operand)
        dw_in = weight_gradient(du, y)
        dy = input_gradient(du, cast(w_in, fc1[WEIGHT], forms.turned_weight)).view_as(tokens)
        first = gated_norm_backward(
            out.dmodulation, dy, dout, tokens, branch, b_proj, modulations, mean, rstd, proj[GRADIENT], forms.operand
        )
        dw_proj = weight_gradient(first.dbranch, x)
        dmixed = input_gradient(first.dbranch, cast(w_proj, proj[WEIGHT], forms.turned_weight)).view_as(tokens)
        gradients = folded([first.dbranch.maxima, du.maxima, out.dbranch.maxima])
        seen = torch.cat([maxima.view(3, 2), gradients.unsqueeze(1)], dim=1)
        weights = dw_proj, first.dbias, dw_in, db_in, dw_out, out.dbias
        return dmixed, first.dx, first.dmodulation, *weights, None, seen, None
