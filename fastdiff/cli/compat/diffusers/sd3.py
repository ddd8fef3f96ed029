"""train_dreambooth_lora_sd3.py; defaults are theirs."""

from fastdiff.cli.compat.diffusers.dreambooth import MEANINGS, SHARED, captioned, dreambooth
from fastdiff.cli.compat.diffusers.given import Given
from fastdiff.cli.compat.table import Defaults, Meaning
from fastdiff.cli.compat.translation import Note, flag
from fastdiff.errors import ConfigError

_LAYERS = (
    "attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out", "attn.to_k", "attn.to_out.0",
    "attn.to_q", "attn.to_v",
)  # fmt: skip
"""Layers that it adapts by default."""
_DEFAULTS: Defaults = SHARED | {
    "output_dir": "sd3-dreambooth", "max_sequence_length": 77, "train_text_encoder": False, "text_encoder_lr": 5e-6,
    "weighting_scheme": "logit_normal", "precondition_outputs": 1, "adam_weight_decay_text_encoder": 1e-3,
    "lora_blocks": None, "prior_generation_precision": None,
}  # fmt: skip


def _targets(given: Given, layers: str | None) -> list[str]:
    named = [part.strip() for part in layers.split(",")] if layers else list(_LAYERS)
    if given.flags.lora_blocks is None:
        return flag("lora.targets", named)
    blocks = [part.strip() for part in given.flags.lora_blocks.split(",")]
    if not all(block.isdecimal() for block in blocks):
        raise ConfigError(f"--lora_blocks {given.flags.lora_blocks}: expected numbers of blocks, as 12,30")
    return flag("lora.targets", [f"transformer_blocks.{block}.{layer}" for block in blocks for layer in named])


def _differences(given: Given) -> list[Note]:
    flags = given.flags
    return [
        (
            flags.precondition_outputs and flags.weighting_scheme == "cosmap",
            "--precondition_outputs 1 with cosmap: it weights the error of the estimated latents, which is sigma^2 "
            "times that of the velocity; here cosmap weights that of the velocity, as theirs with 0",
        ),
        (
            flags.cache_latents and captioned(flags),
            "--cache_latents: each picture keeps its caption; theirs stores latents by step in one pass and reads them "
            "by step in another order, beside captions of other pictures",
        ),
    ]


SD3 = dreambooth(
    "sd35-medium-lora",
    "dreambooth-sd3-lora",
    _DEFAULTS,
    posterior="each-step",
    tokens=256,
    own={
        "lora_layers": Meaning(str, _targets),
        "lora_blocks": Meaning(),
        "precondition_outputs": Meaning(int),
        "weighting_scheme": Meaning(
            str, MEANINGS["weighting_scheme"].words, choices=("sigma_sqrt", "logit_normal", "mode", "cosmap")
        ),
        "text_encoder_lr": Meaning(float, idle="it belongs to --train_text_encoder"),
        "adam_weight_decay_text_encoder": Meaning(float, idle="it belongs to --train_text_encoder"),
    },
    more=_differences,
)
