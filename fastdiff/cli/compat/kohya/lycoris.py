"""``--network_module lycoris.kohya`` of kohya's scripts with ``algo=lokr``: its ``--network_args`` as our flags.

Source: lycoris/kohya.py, lycoris/config.py and lycoris/modules/lokr.py of LyCORIS at 672e80a.
"""

from collections.abc import Mapping

from fastdiff.cli.compat.translation import flag
from fastdiff.errors import ConfigError, require

MODULE = "lycoris.kohya"
"""Value of ``--network_module``."""

_RANK = 4
"""Without ``--network_dim``."""
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
_TRANSFORMERS = (*_ATTENTION, "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2")
_CONVOLUTIONS = ("conv1", "conv2", "conv_shortcut", "time_emb_proj", "downsamplers.0.conv", "upsamplers.0.conv")
_PRESETS: Mapping[str, tuple[str, ...]] = {
    "full": (*_TRANSFORMERS, *_CONVOLUTIONS),
    "unet-only": (*_TRANSFORMERS, *_CONVOLUTIONS),
    "full-lin": (*_TRANSFORMERS, "conv_shortcut", "time_emb_proj"),
    "attn-mlp": _TRANSFORMERS,
    "unet-transformer-only": _TRANSFORMERS,
    "attn-only": _ATTENTION,
    "unet-convblock-only": _CONVOLUTIONS,
}
"""Layers of Stable Diffusion XL that a preset adapts; only convolutions of one pixel are linear."""
_OTHERS: Mapping[str, str] = {
    "dropout": "outputs of the added matrices are not dropped",
    "rank_dropout": "outputs of the added matrices are not dropped",
    "module_dropout": "outputs of the added matrices are not dropped",
    "use_tucker": "convolutions are no Tucker decompositions",
    "use_cp": "convolutions are no Tucker decompositions",
    "use_conv_cp": "convolutions are no Tucker decompositions",
    "use_scalar": "the product has no trained factor",
    "dora_wd": "a LoKr has no magnitudes; --lora.kind dora of `fastdiff train` is DoRA of a LoRA",
    "train_norm": "norms are frozen",
    "rs_lora": "the scale is alpha / rank; give --network_alpha of the same strength",
    "unbalanced_factorization": "the smaller number of rows is that of the first matrix",
    "constraint": "it belongs to another algo",
    "rescaled": "it belongs to another algo",
    "loraplus_lr_ratio": "all matrices have one learning rate",
    "loraplus_unet_lr_ratio": "all matrices have one learning rate",
}
"""Arguments that are refused unless they are off, and why."""
_NOTHING = {"bypass_mode", "block_size", "disable_conv_cp", "loraplus_text_encoder_lr_ratio", "train_t5xxl"}
"""Arguments that change no result of a LoKr of a UNet."""
_KNOWN = {"algo", "preset", "factor", "full_matrix", "decompose_both", "conv_dim", "conv_alpha"}
_OFF = ("", "0", "0.0", "none", "false", "no")


def lokr(arguments: Mapping[str, str], rank: int | None, alpha: float) -> list[str]:
    """Return our flags.

    Args:
        arguments: ``--network_args``.
        rank: ``--network_dim``; None: theirs.
        alpha: ``--network_alpha``.

    Raises:
        ConfigError: an argument has no counterpart.
    """
    rank = rank or _RANK
    algo, preset = arguments.get("algo", "lora").lower(), arguments.get("preset", "full")
    require(
        algo == "lokr",
        f"--network_args algo={algo}: of {MODULE}, lokr alone has a counterpart; --network_module networks.lora is a "
        "LoRA",
    )
    require(
        preset in _PRESETS, f"--network_args preset={preset}: layers are those of {', '.join(_PRESETS)}, and no file's"
    )
    _require_known(arguments)
    _require_one_rank(arguments, rank, alpha)
    return [
        *flag("lora.kind", "lokr"),
        *flag("lora.rank", rank),
        *flag("lora.targets", _PRESETS[preset]),
        *flag("lora.factor", int(_number(arguments, "factor", -1))),
        *flag("lora.full_matrix", True if _on(arguments, "full_matrix") else None),
        *flag("lora.decompose_both", True if _on(arguments, "decompose_both") else None),
    ]


def _on(arguments: Mapping[str, str], name: str) -> bool:
    return arguments.get(name, "").lower() not in _OFF


def _number(arguments: Mapping[str, str], name: str, default: float) -> float:
    text = arguments.get(name) or str(default)
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--network_args {name}={text}: expected a number") from None


def _require_known(arguments: Mapping[str, str]) -> None:
    refused = [f"{name}={value}: {_OTHERS[name]}" for name, value in arguments.items() if name in _OTHERS]
    refused = [text for text in refused if _on(arguments, text.partition("=")[0])]
    unknown = sorted(arguments.keys() - _KNOWN - _OTHERS.keys() - _NOTHING)
    refused += [f"{name}: {MODULE} has no such argument" for name in unknown]
    require(not refused, f"--network_args {'; '.join(refused)}; leave it out")


def _require_one_rank(arguments: Mapping[str, str], rank: int, alpha: float) -> None:
    conv = (_number(arguments, "conv_dim", rank), _number(arguments, "conv_alpha", alpha))
    if conv != (rank, alpha):
        raise ConfigError(
            f"--network_args conv_dim={conv[0]:g} conv_alpha={conv[1]:g}: all layers have one rank and alpha here; "
            f"give those of --network_dim {rank} and --network_alpha {alpha:g}, or preset=attn-mlp"
        )
