"""Family of the UNet of IDDPM and ADM."""

from fastdiff.config.networks.adm import AdmConfig
from fastdiff.models.adm.network import AdmUNet
from fastdiff.models.cost.flops import res_block_multiply_adds, self_attention_multiply_adds
from fastdiff.models.family import ModelFamily, PublishedClass
from fastdiff.models.fused import ONE, Declared, Fused
from fastdiff_kernels.names import AttentionBackend

_GROUPS = 32
"""Groups of every group norm in the classes of improved-diffusion and guided-diffusion, where it is fixed."""


def _build(config: AdmConfig, /, *, recompute: bool, attention: AttentionBackend, seed: int) -> AdmUNet:
    return AdmUNet(config, recompute=recompute, attention=attention, dropout_seed=seed)


def _multiply_adds(config: AdmConfig) -> float:
    time, out = 4 * config.width, config.channels * (2 if config.learn_sigma else 1)
    embedded = time * (2 if config.scale_shift_norm else 1)
    here = config.widths[0]
    skips, total = [here], _input_multiply_adds(config) + time**2 + 9 * config.size**2 * here * out

    def layers(inputs: int, width: int, side: int) -> int:
        attends = side in config.attention_resolutions
        return res_block_multiply_adds(inputs, width, side**2, embedded) + (
            self_attention_multiply_adds(width, side**2) if attends else 0
        )

    def resized(width: int, side: int) -> int:
        return (
            res_block_multiply_adds(width, width, side**2, embedded)
            if config.resblock_updown
            else 9 * width**2 * side**2
        )

    for level, width in enumerate(config.widths):
        side = config.size >> level
        if level:
            total += resized(here, side)
            skips.append(here)
        for _ in range(config.res_blocks):
            total += layers(here, width, side)
            skips.append(here := width)
    total += 2 * res_block_multiply_adds(here, here, side**2, embedded) + self_attention_multiply_adds(here, side**2)
    for level, width in reversed(list(enumerate(config.widths))):
        side = config.size >> level
        for _ in range(config.res_blocks + 1):
            total += layers(here + skips.pop(), width, side)
            here = width
        total += resized(width, 2 * side) if level else 0
    return total


def _input_multiply_adds(config: AdmConfig) -> float:
    channels = config.channels * (2 if config.low_res_size else 1)
    return float(9 * config.size**2 * channels * config.widths[0] + 4 * config.width**2)


def _subject(config: AdmConfig) -> str:
    condition = "A class-conditional" if config.classes else "An unconditional"
    return f"{condition} {'super-resolution ' if config.low_res_size else ''}UNet in pixel space"


def _published(config: AdmConfig) -> PublishedClass:
    """Return the class of improved-diffusion, or of guided-diffusion if the network needs its options.

    Only guided-diffusion has a channel count per head, resampling in residual blocks, a second order of qkv, fractional
    channel multiples, and a finest level of another width than the network's.
    """
    multiples = tuple(int(each) if each == int(each) else each for each in config.channel_mult)  # floats, when read
    whole = all(isinstance(each, int) for each in multiples) and multiples[0] == 1
    guided = bool(config.head_channels or config.resblock_updown or config.qkv_order == "qkv_major" or not whole)
    more = {
        "image_size": config.size,
        "num_head_channels": config.head_channels or -1,
        "resblock_updown": config.resblock_updown,
        "use_new_attention_order": config.qkv_order == "qkv_major",
    }
    arguments = {
        **(more if guided else {}),
        "in_channels": config.channels,
        "model_channels": config.width,
        "out_channels": config.channels * (2 if config.learn_sigma else 1),
        "num_res_blocks": config.res_blocks,
        "attention_resolutions": tuple(config.size // size for size in config.attention_resolutions),
        "dropout": config.dropout,
        "channel_mult": multiples,
        "num_classes": config.classes or None,
        "num_heads": config.heads,
        "use_scale_shift_norm": config.scale_shift_norm,
    }
    kind = "SuperResModel" if config.low_res_size else "UNetModel"
    call = ", ".join(f"{name}={value}" for name, value in arguments.items())
    owner = "guided-diffusion" if guided else "improved-diffusion"
    return PublishedClass(owner=owner, call=f"{kind}({call})", note=_other_norms(config.norm_num_groups, owner))


def _other_norms(groups: int, owner: str) -> str:
    """Describe other groups of the norms: shapes do not show them, so the class loads the weights anyway."""
    if groups == _GROUPS:
        return ""
    return (
        f"Each group norm of this network has {groups} groups, in the class of {owner} {_GROUPS}: unless you change "
        "that class, it cannot be constructed, or gives other results with these weights."
    )


_MATRICES: Declared = {
    "input_blocks.0.0.weight": None,
    "label_emb.weight": None,
    "time_embed.0.weight": None,
    "time_embed.2.weight": ONE,
    "input_blocks.*.weight": ONE,
    "middle_block.*.weight": ONE,
    "output_blocks.*.weight": ONE,
    "out.2.weight": None,
}


def _matrices(config: AdmConfig) -> Declared:
    """Return the matrices; queries, keys and values follow each other in every head, or once."""
    by_head = config.qkv_order == "head_major"
    qkv = Fused((1, 1, 1), groups=config.heads_of if by_head else lambda columns: 1)
    modulation = Fused((1, 1)) if config.scale_shift_norm else ONE
    return {"*.qkv.weight": qkv, "*.emb_layers.1.weight": modulation, **_MATRICES}


ADM = ModelFamily(
    config=AdmConfig,
    build=_build,
    multiply_adds=_multiply_adds,
    input_multiply_adds=_input_multiply_adds,
    draws_on_meta=True,
    subject=_subject,
    published=_published,
    script_format="iddpm",
    matrices=_matrices,
    formats={
        "diffusers": "fastdiff.export.diffusers_adm:DIFFUSERS",
        "iddpm": "fastdiff.export.original_checkpoint:IDDPM",
    },
)
