"""Pretrained weights and LoRA: the starting point of a run. This module imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastdiff.config.local_paths import require_local
from fastdiff.config.networks.adapter_rank import rank_of
from fastdiff.errors import require

WEIGHT_FILES = (".pt", ".safetensors")
"""Suffixes of the files that hold the weights of one network."""
HUB_ID = r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?"
"""Pattern of an id of the Hugging Face hub."""
CAPTION_TOKENS = 77
"""Length of a caption in CLIP tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainedConfig:
    """A text-to-image pipeline in the layout of diffusers, or the weights of a DiT or an ADM UNet in one file."""

    path: str = ""
    """Folder or Hugging Face id of the pipeline whose autoencoder, text encoder and scheduler the run uses; for a DiT
    or an ADM UNet, a .safetensors or .pt file of weights."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face id."""
    variant: str | None = None
    """Variant of the weight files, for example fp16 or non_ema."""
    max_tokens: int | None = None
    """Maximum tokens of a prompt, of text encoders with captions of variable length, as `fastdiff encode --max-tokens`;
    None: as the pipeline."""
    weights: bool = False
    """Start from the pretrained network (fine-tuning); otherwise from random weights. The shape of a pipeline's network
    replaces --model. For a file, set --model as it was trained, including --model.base_width, which divides the
    output, and --model.qkv_order (qkv_major is --use_new_attention_order True of guided-diffusion): the shapes of the
    weights show neither. They do not show
    --num_heads_upsample of improved-diffusion and guided-diffusion either: networks trained with it, except with the
    value of --num_heads, are not supported and would compute something else."""
    training: bool = False
    """Continue a published training with its averages, AdamW state and step. The path names its weights (modelNNNNNN.pt
    of improved-diffusion and guided-diffusion, NNNNNNN.pt of DiT)."""

    def __post_init__(self) -> None:
        require_local("--pretrained.path", self.path)
        require(not self.weights or bool(self.path), "--pretrained.weights needs --pretrained.path")
        require(
            self.max_tokens is None or (self.max_tokens >= 1 and bool(self.path) and not self.is_file),
            f"--pretrained.max_tokens {self.max_tokens}: expected at least 1, with --pretrained.path of a pipeline",
        )
        require(
            not self.training or (self.weights and self.path.endswith(".pt")),
            "--pretrained.training needs --pretrained.weights and the .pt file of a training",
        )

    @property
    def is_file(self) -> bool:
        """Whether ``path`` names a file of weights instead of a pipeline."""
        return Path(self.path).suffix in WEIGHT_FILES


_OPTIONS: Mapping[str, tuple[str, object]] = {
    "factor": ("lokr", None), "full_matrix": ("lokr", False), "decompose_both": ("lokr", False),
}  # fmt: skip
"""Options of one kind of adapter, with that kind and their defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685) of frozen pretrained weights."""

    kind: Literal["lora", "dora", "lokr"] = "lora"
    """Kind of adapter: lora (arXiv:2106.09685) adds the product of two matrices; dora (arXiv:2402.09353) then scales
    each row of the changed weight to a trained norm; lokr (LyCORIS, arXiv:2309.14859) adds the Kronecker product of
    two."""

    rank: int = 0
    """Rank of the added matrices; 0: that of ``init``, without it all weights are trained."""
    alpha: float | None = None
    """Numerator of the scale alpha / rank of the added matrices. None: that of ``init``, or the rank."""
    targets: tuple[str, ...] = ()
    """Suffixes of the names of the adapted layers. Default: those of ``init``, or the projections of the attention."""
    init: str = ""
    """Adapter to start from: a .safetensors file of diffusers, ComfyUI or kohya's scripts. Rank, alpha and layers are
    those of the file unless given; a higher rank and further layers start as without a file."""
    skip_text_encoders: bool = False
    """Leave out the layers of ``init`` that are of text encoders, which are not trained here; otherwise such a file is
    refused."""
    factor: int | None = None
    """Of lokr: rows and columns of the smaller matrix, or of the larger one if the layer has fewer; -1: as near as
    possible to those of the larger one. None: those of ``init``, or -1."""
    full_matrix: bool = False
    """Of lokr: train both matrices whole. Otherwise the larger one is a product of ``rank``, unless the rank is half of
    its longer side or more; where both are whole, alpha has no effect."""
    decompose_both: bool = False
    """Of lokr: also make the smaller matrix such a product."""
    quantize: Literal["none", "8bit", "4bit"] = "none"
    """Keep the frozen matrices in 8 or 4 bits (bitsandbytes; 4 bits: NF4 of QLoRA, arXiv:2305.14314)."""

    def __post_init__(self) -> None:
        if self.init:
            require_local("--lora.init", self.init)
            require(self.init.endswith(".safetensors"), f"--lora.init {self.init}: expected a .safetensors file")
            object.__setattr__(self, "rank", self.rank or rank_of(Path(self.init)))
        require(not self.skip_text_encoders or bool(self.init), "--lora.skip-text-encoders needs --lora.init")
        require(self.rank >= 0, f"--lora.rank {self.rank}: 0 (no LoRA) or above")
        require(self.alpha is None or 0 < self.alpha < math.inf, f"--lora.alpha {self.alpha}: above 0, or None")
        for name, default in (("kind", "lora"), ("alpha", None), ("targets", ()), ("quantize", "none")):
            require(self.rank > 0 or getattr(self, name) == default, f"--lora.{name} needs --lora.rank above 0")
        for name, (owner, unset) in _OPTIONS.items():
            given = getattr(self, name)
            require(self.kind == owner or given == unset, f"--lora.{name} {given} is for --lora.kind {owner}")
        require(
            self.factor is None or self.factor == -1 or self.factor > 0,
            f"--lora.factor {self.factor}: above 0, or -1 for the nearest to a square",
        )
        require(
            not (self.full_matrix and self.decompose_both),
            "--lora.full_matrix with --lora.decompose_both: one makes no matrix a product, the other both",
        )

    @property
    def numerator(self) -> float:
        """``alpha``, or its default: the numerator of the scale of the added matrices."""
        return self.rank if self.alpha is None else self.alpha
