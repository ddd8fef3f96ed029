"""Pretrained weights and LoRA: where a run starts from. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastdiff.config.networks.adm import AdmConfig as AdmConfig
from fastdiff.config.networks.registry import ModelConfig as ModelConfig
from fastdiff.errors import require

CAPTION_TOKENS = 77
"""Tokens of a caption for CLIP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainedConfig:
    """A Stable Diffusion pipeline in the layout of diffusers, or the weights of a DiT or an ADM UNet in one file."""

    path: str = ""
    """Folder or Hugging Face id of the pipeline whose autoencoder, text encoder and scheduler belong to the run; for a
    DiT or an ADM UNet, a .safetensors or .pt file of weights."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face id."""
    variant: str | None = None
    """Variant of the weight files, for example fp16 or non_ema."""
    weights: bool = False
    """Start from its network (fine-tuning), else from random weights. The shape of a pipeline's replaces --model; for a
    file say --model as it was trained, also --model.qkv_order, which no shape tells (qkv_major is
    --use_new_attention_order True of guided-diffusion)."""
    training: bool = False
    """Go on with the published training of which the path names the weights (modelNNNNNN.pt of improved-diffusion and
    guided-diffusion, NNNNNNN.pt of DiT): also with its averages, the state of its AdamW and its step."""

    def __post_init__(self) -> None:
        require(not self.weights or bool(self.path), "--pretrained.weights needs --pretrained.path")
        require(
            not self.training or (self.weights and self.path.endswith(".pt")),
            "--pretrained.training needs --pretrained.weights and the .pt file of a training",
        )

    @property
    def is_file(self) -> bool:
        """Whether ``path`` names a file of weights and no pipeline."""
        return Path(self.path).suffix in (".safetensors", ".pt")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685): the pretrained weights stay as they are."""

    rank: int = 0
    """Rank of the added matrices; 0: train all weights."""
    alpha: float | None = None
    """Scale of what is added, times 1 / rank. None: the rank."""
    targets: tuple[str, ...] = ()
    """Layers that are adapted, by the end of their names. Default: the attention's projections."""
    quantize: Literal["none", "8bit", "4bit"] = "none"
    """Keep the frozen matrices in 8 or 4 bits (bitsandbytes; 4 bits: NF4 of QLoRA, arXiv:2305.14314)."""

    def __post_init__(self) -> None:
        require(self.rank >= 0, f"--lora.rank {self.rank}: 0 (no LoRA) or above")
        require(self.alpha is None or self.alpha > 0, f"--lora.alpha {self.alpha}: above 0, or None")
        for name, default in (("alpha", None), ("targets", ()), ("quantize", "none")):
            require(self.rank > 0 or getattr(self, name) == default, f"--lora.{name} needs --lora.rank above 0")

    @property
    def numerator(self) -> float:
        """``alpha``, or its default: what is added is scaled by this over the rank."""
        return self.rank if self.alpha is None else self.alpha
