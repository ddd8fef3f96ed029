"""DoRA (Liu et al. 2024, arXiv:2402.09353): LoRA for the direction of each row of a weight, and a trained magnitude.

``W x + b`` becomes ``m / n * (W + s B A) x + b`` with the norm ``n = ||W + s B A||`` of each row; of a convolution, of
the weights of each output. As in section 4.3 of the paper n has no gradient. The paper's columns are torch's rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.config.networks.pretrained import LoraConfig
from fastdiff.errors import ConfigError, require
from fastdiff.models.adapter_files.forms import DIFFUSERS, NATIVE, Form
from fastdiff.models.adapter_files.low_rank import LowRank, row_norms
from fastdiff.models.adapter_files.native_names import NamedNetwork
from fastdiff.models.adapter_files.readers import COMFYUI, DIFFUSERS_READER, Reader
from fastdiff.models.adapter_kinds.kind import AdapterKind, FileLayer, Read, metadata_of_lora
from fastdiff.models.adapter_kinds.lora import SPELLINGS
from fastdiff.models.adapter_kinds.lora import read as read_lora
from fastdiff.models.build import Model

_DOWN, _UP, _MAGNITUDE = ".lora_A", ".lora_B", ".lora_magnitude_vector"
_SQUARES = ".squares"
_MARK = "fastdiff_dora_scale"
"""In the metadata of files whose magnitudes are for ComfyUI."""


class DoraLayer(nn.Module):
    """A linear layer or convolution with a DoRA.

    The norm of a row is ``n^2 = |W|^2 + 2 s sum(A W^T * B) + s^2 sum(B A A^T * B)``, summed over the rank. ``A W^T`` is
    the frozen layer applied to the rows of A. So the frozen weight is used in no other way than by its own layer, which
    may be quantised, or under ZeRO-3 without its weight at other times.

    Args:
        layer: frozen.
        rank: of A and B.
        scale: s, alpha / rank.

    Raises:
        ValueError: the layer is a convolution with groups or dilation, or padded by others than zeros.
    """

    squares: Tensor
    """Bytes of ``|W|^2`` of each row, fp32, as uint8: DeepSpeed would cast numbers to bf16. 0 until it is set."""

    def __init__(self, layer: nn.Module, rank: int, scale: float) -> None:
        super().__init__()
        weight = layer.weight
        if not isinstance(weight, Tensor) or not isinstance(layer, nn.Linear | nn.Conv2d):
            raise ValueError(f"a DoRA is for linear layers and convolutions, not for {type(layer).__name__}")
        self._conv: Mapping[str, Any] = {}
        if isinstance(layer, nn.Conv2d):
            if layer.groups > 1 or set(layer.dilation) != {1} or not isinstance(layer.padding, tuple):
                raise ValueError("a DoRA is for convolutions without groups and dilation")
            if layer.padding_mode != "zeros":
                raise ValueError("a DoRA is for convolutions padded by zeros")
            self._conv = {"stride": layer.stride, "padding": layer.padding}
        outputs, *inputs = weight.shape
        self.base_layer, self.scale, self.adapts = layer, scale, True
        with weight.device:
            self.lora_A = nn.Parameter(torch.randn(rank, *inputs) / rank)
            self.lora_B = nn.Parameter(torch.zeros(outputs, rank, *[1] * (len(inputs) - 1)))
            self.lora_magnitude_vector = nn.Parameter(torch.zeros(outputs))
            self.register_buffer("squares", torch.zeros(4 * outputs, dtype=torch.uint8), persistent=False)

    @property
    def weight(self) -> Tensor:
        """The frozen weight."""
        return self.base_layer.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        """The frozen bias."""
        return self.base_layer.bias  # type: ignore[return-value]

    def enable_adapters(self, enabled: bool) -> None:
        """Compute with or without the adapter."""
        self.adapts = enabled

    def forward(self, x: Tensor) -> Tensor:
        """``[..., inputs] -> [..., outputs]``, of a convolution ``[B, inputs, H, W] -> [B, outputs, H', W']``."""
        out: Tensor = self.base_layer(x)
        if not self.adapts:
            return out
        norm, bias = self._norm_and_bias(x.dtype)
        # Rounded as the magnitude is, so that a fresh adapter changes nothing in bf16 either.
        norm = norm.to(self.lora_magnitude_vector.dtype).float()
        gain = torch.where(norm > 0, self.lora_magnitude_vector.float() / torch.where(norm > 0, norm, 1.0), 1.0)
        added = self._product(x.to(self.lora_A.dtype)).to(out.dtype)
        if self._conv:
            gain, bias = gain.view(-1, 1, 1), bias.view(-1, 1, 1)
        return out + (gain - 1.0).to(out.dtype) * (out - bias) + (gain * self.scale).to(out.dtype) * added

    def _product(self, x: Tensor) -> Tensor:
        if self._conv:
            return F.conv2d(F.conv2d(x, self.lora_A, **self._conv), self.lora_B)
        return F.linear(F.linear(x, self.lora_A), self.lora_B)

    @torch.no_grad()
    def _norm_and_bias(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the norm of each row of the changed weight, ``[outputs]`` fp32, and the bias, ``[outputs]``."""
        rows = self._frozen(torch.cat([self.lora_A, torch.zeros_like(self.lora_A[:1])]).to(dtype))
        bias = rows[-1]
        down, up = self.lora_A.float().flatten(1), self.lora_B.float().flatten(1)
        crossed = ((rows[:-1].float() - bias.float()).T * up).sum(1)
        own = (up @ (down @ down.T) * up).sum(1)
        squares = self.squares.view(torch.float32) + 2.0 * self.scale * crossed + self.scale**2 * own
        return squares.clamp_min(0.0).sqrt(), bias

    def _frozen(self, rows: Tensor) -> Tensor:
        """Apply the frozen layer to patches of the size of its kernel, ``[N, inputs, ...] -> [N, outputs]``."""
        if not self._conv:
            return self.base_layer(rows)  # type: ignore[no-any-return]
        # Zeros before a patch move it to where a position of the kernel lies.
        (rise, run), (top, left) = self._conv["stride"], self._conv["padding"]
        above, before = -top % rise, -left % run
        out: Tensor = self.base_layer(F.pad(rows, (before, 0, above, 0)))
        return out[:, :, (top + above) // rise, (left + before) // run]


def _inject(model: Model, config: LoraConfig, layers: list[str]) -> None:
    for name in layers:
        parent, _, child = name.rpartition(".")
        layer = DoraLayer(model.get_submodule(name), config.rank, config.numerator / config.rank)
        setattr(model.get_submodule(parent), child, layer)


def _of_base(weight: Tensor) -> dict[str, Tensor]:
    squares = weight.double().square().flatten(1).sum(1).float()
    return {_SQUARES: squares.view(torch.uint8), _MAGNITUDE: squares.sqrt()}


def _unchanged(layer: nn.Module) -> dict[str, Tensor]:
    squares = layer.get_buffer(_SQUARES[1:]).view(torch.float32)
    return {_MAGNITUDE: squares.sqrt()}


def _change(parameters: Mapping[str, Tensor], config: LoraConfig) -> LowRank:
    return LowRank(parameters[_DOWN], parameters[_UP], config.numerator, parameters[_MAGNITUDE])


def _start(parameters: Mapping[str, Tensor], change: LowRank, config: LoraConfig) -> None:
    assert change.magnitude is not None
    with torch.no_grad():
        parameters[_DOWN][: change.rank] = change.down
        parameters[_UP][:, : change.rank] = change.up * (change.scale / (config.numerator / config.rank))
        parameters[_MAGNITUDE].copy_(change.magnitude)


def _read(layer: FileLayer) -> LowRank:
    found = layer.tensors.get("magnitude", layer.tensors.get("magnitude of peft"))
    if found is None:
        raise ConfigError(f"{layer.key} has no magnitudes, it is a LoRA; use --lora.kind lora")
    require(
        _MARK not in layer.metadata,
        "its magnitudes are for ComfyUI (--format lora-native); give the file of --format lora-diffusers",
    )
    outputs, more = layer.shape[0], [1] * (len(layer.shape) - 1)
    shapes = [[outputs], [outputs, *more]]
    if "magnitude of peft" in layer.tensors:
        shapes.append([1, outputs, *more[1:]])
    require(
        list(found.shape) in shapes,
        f"{layer.key} has magnitudes {list(found.shape)}, expected {shapes[-1]}, one for each output; those for each "
        "input, which LyCORIS has without wd_on_output, are another decomposition and not supported",
    )
    return replace(read_lora(layer), magnitude=found.flatten())


def _for_form(changes: Mapping[str, LowRank], form: Form, network: NamedNetwork, base: Read) -> dict[str, LowRank]:
    """Return the changes with the magnitudes that the program of a form expects; a fused layer has those of all parts.

    ComfyUI divides by the norm of the unchanged weight (``weight_decompose`` of comfy/weight_adapter/base.py), so its
    magnitudes have the quotient of the norms.
    """
    if form == DIFFUSERS:
        return dict(changes)
    found = {}
    for native in network.natives:
        parts = native.parts if any(part in changes for part in native.parts) else ()
        for part in parts:
            weight = base(f"{part}.weight")
            norm = row_norms(weight)
            change = changes.get(part) or _nothing(weight, norm)
            assert change.magnitude is not None
            changed = row_norms(weight + change.change()).clamp_min(torch.finfo(torch.float32).tiny)
            found[part] = replace(change, magnitude=change.magnitude * norm / changed)
    return found


def _nothing(weight: Tensor, norm: Tensor) -> LowRank:
    """Return the change of a weight that stays as it is."""
    down, up = torch.zeros(1, *weight.shape[1:]), torch.zeros(len(weight), 1, *[1] * (weight.ndim - 2))
    return LowRank(down, up, 1.0, norm)


def _metadata(form: Form, part: str, config: LoraConfig, layers: Sequence[str]) -> dict[str, str]:
    own = {"use_dora": True} if form == DIFFUSERS else {_MARK: "magnitude * norm of W / norm of W + s B A"}
    return metadata_of_lora(form, part, config, layers, **own)


def _applied_by(reader: Reader, form: Form, diffusers_class: str) -> bool:
    """Whether a program does: diffusers and kohya's scripts drop ``dora_scale``, ComfyUI the name that peft has."""
    return (reader, form) in ((DIFFUSERS_READER, DIFFUSERS), (COMFYUI, NATIVE))


DORA = AdapterKind(
    title="DoRA",
    inject=_inject,
    parameters=(_DOWN, _UP, _MAGNITUDE),
    of_base=_of_base,
    unchanged=_unchanged,
    change=_change,
    start=_start,
    spellings={
        ".dora_scale": "magnitude",  # LyCORIS
        ".lora_magnitude_vector": "magnitude of peft",
        ".lora_magnitude_vector.weight": "magnitude of peft",
        ".lora_magnitude_vector.default.weight": "magnitude of peft",
        **SPELLINGS,
    },
    formula="A layer has the weight m V / ||V|| with V = W + B A and the norm of each row: `lora_magnitude_vector` is "
    "m, `lora_B` times `lora_A` is B A, and the scale alpha / rank is in B.",
    for_diffusers="lora-diffusers",
    for_comfyui="lora-native",
    expected="A, B and the magnitudes of each layer, and alpha at most",
    read=_read,
    for_form=_for_form,
    metadata=_metadata,
    applied_by=_applied_by,
)
