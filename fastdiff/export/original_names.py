"""Names of the original Stable Diffusion (CompVis, Stability AI) for the weights of autoencoder and text encoders.

Programs with single-file checkpoints know the weights by these names.
"""

import re

_AUTOENCODER = (
    (r"\bdown_blocks\.", "down."), (r"\.resnets\.(?=\d+\.\w+\.)(?<!mid_block\.resnets\.)", ".block."),
    (r"\bmid_block\.resnets\.0\b", "mid.block_1"), (r"\bmid_block\.resnets\.1\b", "mid.block_2"),
    (r"\bmid_block\.attentions\.0\.", "mid.attn_1."), (r"\.attentions\.(?=\d+\.)", ".attn."),
    (r"\bdownsamplers\.0\.", "downsample."),
    (r"\bupsamplers\.0\.", "upsample."), (r"\bconv_norm_out\b", "norm_out"), (r"\bconv_shortcut\b", "nin_shortcut"),
    (r"\bgroup_norm\b", "norm"), (r"\b(to_q|query)\b", "q"), (r"\b(to_k|key)\b", "k"), (r"\b(to_v|value)\b", "v"),
    (r"\b(to_out\.0|proj_attn)\b", "proj_out"),
)  # fmt: skip
"""Replacements in the names of diffusers' autoencoder; its attention has had two sets of names."""
_OPEN_CLIP = (
    (r"^encoder\.layers\.", "transformer.resblocks."), (r"\blayer_norm1\b", "ln_1"), (r"\blayer_norm2\b", "ln_2"),
    (r"\bmlp\.fc1\b", "mlp.c_fc"), (r"\bmlp\.fc2\b", "mlp.c_proj"), (r"\bself_attn\b", "attn"),
    (r"^embeddings\.token_embedding\b", "token_embedding"), (r"^final_layer_norm\b", "ln_final"),
    (r"^embeddings\.position_embedding\.weight$", "positional_embedding"),
    (r"^text_projection\.weight$", "text_projection"),
)  # fmt: skip


def autoencoder_weight(name: str, levels: int) -> str:
    """Return the original name of a weight of the autoencoder; the original decoder counts its levels from the finest.

    Args:
        name: in diffusers' ``AutoencoderKL``.
        levels: of the autoencoder.
    """
    name = re.sub(r"^decoder\.up_blocks\.(\d+)", lambda found: f"decoder.up.{levels - 1 - int(found[1])}", name)
    for theirs, original in _AUTOENCODER:
        name = re.sub(theirs, original, name)
    return name


def open_clip_weight(name: str) -> str:
    """Return OpenCLIP's name of a weight, but queries, keys and values, from transformers' without ``text_model.``."""
    for theirs, original in _OPEN_CLIP:
        name = re.sub(theirs, original, name)
    return name
