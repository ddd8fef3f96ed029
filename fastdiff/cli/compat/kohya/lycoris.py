"""``--network_module lycoris.kohya`` of kohya's scripts: its ``--network_args`` as our flags.

Source: lycoris/kohya.py, lycoris/config.py, lycoris/modules/locon.py and lokr.py of LyCORIS at f49d30d.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fastdiff.cli.compat.translation import flag
from fastdiff.errors import ConfigError, require

MODULE = "lycoris.kohya"
"""Value of ``--network_module``."""

_RANK = 4
"""Without ``--network_dim``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Algo:
    """A value of ``algo``."""

    kind: str
    """Of ``--lora.kind``."""
    decomposed: str = ""
    """That with ``dora_wd=True``; empty: none."""
    own: frozenset[str] = frozenset()
    """Arguments that it alone reads."""


_LOCON = _Algo(kind="lora", decomposed="dora", own=frozenset({"wd_on_output"}))
_LOKR = _Algo(kind="lokr", own=frozenset({"factor", "full_matrix", "decompose_both"}))
_ALGOS: Mapping[str, _Algo] = {"lora": _LOCON, "locon": _LOCON, "lokr": _LOKR}
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
"""Arguments that change no result of these algos of a UNet."""
_OF_ALGOS = _LOCON.own | _LOKR.own
_KNOWN = {"algo", "preset", "dora_wd", "conv_dim", "conv_alpha"} | _OF_ALGOS
_SWITCHES = {
    "dora_wd", "wd_on_output", "full_matrix", "bypass_mode", "use_tucker", "use_scalar", "train_norm", "rs_lora",
}  # fmt: skip
"""Arguments that theirs takes for off at ``false`` alone; ``decompose_both`` it takes for on at any word."""
_OFF = ("", "0", "0.0", "none", "false", "no")


def kind_of(arguments: Mapping[str, str]) -> str:
    """Return the value of ``--lora.kind``; ConfigError: the algo has no counterpart."""
    algo = _algo(arguments)
    return algo.decomposed if algo.decomposed and _on(arguments, "dora_wd") else algo.kind


def told(arguments: Mapping[str, str]) -> list[str]:
    """Return what to tell of the arguments: those that change nothing, and those that theirs takes for on."""
    idle = sorted(arguments.keys() & (_NOTHING | _OF_ALGOS - _algo(arguments).own))
    on = {name for name in _SWITCHES & arguments.keys() if arguments[name].lower() != "false"}
    on |= {"decompose_both"} & arguments.keys()
    off = sorted(name for name in on.difference(idle) if not _on(arguments, name))
    return [
        *(f"--network_args {name} changes nothing here" for name in idle),
        *(f"--network_args {name}={arguments[name]}: off here; theirs takes this word for on" for name in off),
    ]


def words(arguments: Mapping[str, str], rank: int | None, alpha: float) -> list[str]:
    """Return our flags.

    Args:
        arguments: ``--network_args``.
        rank: ``--network_dim``; None: theirs.
        alpha: ``--network_alpha``.

    Raises:
        ConfigError: an argument has no counterpart.
    """
    rank = rank or _RANK
    algo, preset = _algo(arguments), arguments.get("preset", "full")
    require(
        preset in _PRESETS, f"--network_args preset={preset}: layers are those of {', '.join(_PRESETS)}, and no file's"
    )
    _require_known(arguments)
    _require_magnitudes(arguments, algo)
    _require_one_rank(arguments, rank, alpha)
    own = {
        "factor": int(_number(arguments, "factor", -1)),
        "full_matrix": _on(arguments, "full_matrix") or None,
        "decompose_both": _on(arguments, "decompose_both") or None,
    }
    return [
        *flag("lora.kind", kind_of(arguments)),
        *flag("lora.rank", rank),
        *flag("lora.targets", _PRESETS[preset]),
        *(word for name, value in own.items() if name in algo.own for word in flag(f"lora.{name}", value)),
    ]


def _algo(arguments: Mapping[str, str]) -> _Algo:
    name = (arguments.get("algo") or "lora").lower()
    require(name in _ALGOS, f"--network_args algo={name}: of {MODULE}, {', '.join(_ALGOS)} alone have a counterpart")
    return _ALGOS[name]


def _on(arguments: Mapping[str, str], name: str) -> bool:
    return arguments.get(name, "").lower() not in _OFF


def _number(arguments: Mapping[str, str], name: str, default: float) -> float:
    text = arguments.get(name) or str(default)
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--network_args {name}={text}: expected a number") from None


def _require_known(arguments: Mapping[str, str]) -> None:
    given = [name for name in arguments if name in _OTHERS and _on(arguments, name)]
    refused = [f"{name}={arguments[name]}: {_OTHERS[name]}" for name in given]
    unknown = sorted(arguments.keys() - _KNOWN - _OTHERS.keys() - _NOTHING)
    refused += [f"{name}: {MODULE} has no such argument" for name in unknown]
    require(not refused, f"--network_args {'; '.join(refused)}; leave it out")


def _require_magnitudes(arguments: Mapping[str, str], algo: _Algo) -> None:
    """Refuse a DoRA that computes something else than ours."""
    if not _on(arguments, "dora_wd"):
        return
    given = f"--network_args dora_wd={arguments['dora_wd']}"
    require(bool(algo.decomposed), f"{given}: a {algo.kind} has no magnitudes here; leave it out, or give algo=lora")
    require(
        "wd_on_output" not in arguments or _on(arguments, "wd_on_output"),
        f"{given} wd_on_output={arguments.get('wd_on_output')}: magnitudes here are of the outputs, as theirs are by "
        "default; leave wd_on_output out",
    )
    require(
        not _on(arguments, "bypass_mode"),
        f"{given} bypass_mode={arguments.get('bypass_mode')}: theirs then trains no magnitudes; leave one of them out",
    )


def _require_one_rank(arguments: Mapping[str, str], rank: int, alpha: float) -> None:
    conv = (_number(arguments, "conv_dim", rank), _number(arguments, "conv_alpha", alpha))
    if conv != (rank, alpha):
        raise ConfigError(
            f"--network_args conv_dim={conv[0]:g} conv_alpha={conv[1]:g}: all layers have one rank and alpha here; "
            f"give those of --network_dim {rank} and --network_alpha {alpha:g}, or preset=attn-mlp"
        )
