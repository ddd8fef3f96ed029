"""Names of the original Stable Diffusion (CompVis, Stability AI) for the layers of diffusers' UNet.

Programs with single-file checkpoints know the layers by these names, and adapters of SDXL have them as well.
"""

from collections.abc import Iterable

from fastdiff.config.networks.unet import UNetConfig

_OUTSIDE = {
    "conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
}  # fmt: skip
"""Layers outside of the blocks."""
_MIDDLE = {"resnets.0": "0", "attentions.0": "1", "resnets.1": "2"}
_RES_BLOCK = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1", "norm2": "out_layers.0",
    "conv2": "out_layers.3", "conv_shortcut": "skip_connection",
}  # fmt: skip


def original_layer(layer: str, model: UNetConfig) -> str:
    """Return the original name of a layer, such as ``input_blocks.1.1.proj_in``.

    Args:
        layer: name in diffusers and here, such as ``down_blocks.0.attentions.0.proj_in``.
        model: shape of the UNet.
    """
    if layer in _OUTSIDE:
        return _OUTSIDE[layer]
    block, *parts = layer.split(".")
    if block == "mid_block":
        kind, number, *rest = parts
        return ".".join(["middle_block", _MIDDLE[f"{kind}.{number}"], *_inside(kind, rest)])
    level, kind, number, *rest = parts
    return ".".join([*_place(block, int(level), kind, int(number), model), *_inside(kind, rest)])


def original_weights(names: Iterable[str], model: UNetConfig) -> dict[str, str]:
    """Return the name of each weight by its original name."""
    split = (name.rpartition(".") for name in names)
    return {f"{original_layer(layer, model)}.{part}": f"{layer}.{part}" for layer, _, part in split}


def _inside(kind: str, rest: list[str]) -> list[str]:
    """Return the rest of a name, within its block; transformers have the same names in both."""
    if kind == "resnets":
        return [_RES_BLOCK[rest[0]]]
    return [{"downsamplers": "op"}.get(kind, "conv")] if kind.endswith("samplers") else rest


def _place(block: str, level: int, kind: str, number: int, model: UNetConfig) -> list[str]:
    """Return the numbered block, and the number within it. A level has its blocks, and then that of its resizing."""
    per_level = model.layers_per_block + 1
    if block == "down_blocks":
        number = model.layers_per_block if kind == "downsamplers" else number
        return ["input_blocks", str(1 + level * per_level + number), "1" if kind == "attentions" else "0"]
    within = {"resnets": 0, "attentions": 1, "upsamplers": 2 if model.transformer_layers[-1 - level] else 1}
    number = model.layers_per_block if kind == "upsamplers" else number
    return ["output_blocks", str(level * per_level + number), str(within[kind])]
