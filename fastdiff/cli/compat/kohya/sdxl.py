"""sdxl_train_network.py and sdxl_train.py; defaults are theirs."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastdiff.cli.compat.kohya import lycoris
from fastdiff.cli.compat.kohya.given import Given
from fastdiff.cli.compat.kohya.meanings import MEANINGS
from fastdiff.cli.compat.kohya.script import KohyaScript
from fastdiff.cli.compat.table import SWITCH, Defaults, Meaning
from fastdiff.cli.compat.translation import absolute, flag
from fastdiff.config.arguments.types import count
from fastdiff.config.networks.adapter_rank import kind_of_file
from fastdiff.errors import ConfigError, require

_OFF = {name: False for name, meaning in MEANINGS.items() if meaning.kind is SWITCH}
_VALUES: dict[str, object] = dict.fromkeys(name for name in MEANINGS if name not in _OFF) | {
    "caption_separator": ",", "caption_extension": ".caption", "keep_tokens": 0, "keep_tokens_separator": "",
    "vae_batch_size": 1, "min_bucket_reso": 256, "max_bucket_reso": 1024, "bucket_reso_steps": 64,
    "token_warmup_min": 1, "token_warmup_step": 0, "caption_dropout_rate": 0.0, "caption_dropout_every_n_epochs": 0,
    "caption_tag_dropout_rate": 0.0, "dataset_repeats": 1, "train_batch_size": 1, "dynamo_backend": "inductor",
    "max_train_steps": 1600, "max_data_loader_n_workers": 8, "gradient_accumulation_steps": 1, "mixed_precision": "no",
    "multires_noise_discount": 0.3, "loss_type": "l2", "huber_schedule": "snr", "huber_c": 0.1, "huber_scale": 1.0,
    "sample_sampler": "ddim", "zero_stage": 2, "optimizer_type": "", "learning_rate": 2.0e-6, "max_grad_norm": 1.0,
    "lr_scheduler_type": "", "lr_scheduler": "constant", "lr_warmup_steps": 0, "lr_decay_steps": 0,
    "lr_scheduler_num_cycles": 1, "lr_scheduler_power": 1,
}  # fmt: skip
"""Defaults of both scripts; the others are None."""
_OF_NETWORKS: dict[str, object] = {
    "prior_loss_weight": 1.0, "initial_epoch": None, "initial_step": None, "skip_until_initial_step": False,
    "validation_seed": None, "validation_split": 0.0, "validate_every_n_steps": None, "validate_every_n_epochs": None,
    "max_validation_steps": None,
}  # fmt: skip
"""Flags of sdxl_train_network.py alone, with their defaults."""
_ALL: dict[str, object] = {**_OFF, **_VALUES}
_BOTH: dict[str, object] = {name: value for name, value in _ALL.items() if name not in _OF_NETWORKS}

_LAYERS = ("to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2")
"""Linear layers of the transformer blocks, which networks.lora adapts."""
_CONVOLUTIONS = ("conv1", "conv2", "conv_shortcut", "time_emb_proj", "downsamplers.0.conv", "upsamplers.0.conv")
"""Layers of residual blocks, which it adapts too with conv_dim."""
_RANK, _ALPHA = 4, 1.0
"""Of networks.lora without --network_dim and with conv_dim alone."""
_RATES = {"down_lr_weight", "mid_lr_weight", "up_lr_weight"}
"""Arguments that networks.lora reads with --dim_from_weights, too."""
_BASE = "the base is frozen as it is published; merge the files into it first, and give that"
_TEXT = (
    "text encoders are not trained here; give --network_train_unet_only, as theirs recommends for Stable Diffusion XL"
)


def _network(given: Given, module: str | None) -> list[str]:
    require(bool(module), "--network_module is missing; their script needs it too: networks.lora")
    if module not in ("networks.lora", lycoris.MODULE):
        raise ConfigError(
            f"--network_module {module}: networks here are those of networks.lora, and of {lycoris.MODULE} with "
            "algo=lora, locon or lokr"
        )
    arguments = _arguments(given.flags)
    if given.flags.dim_from_weights:
        require(bool(given.flags.network_weights), "--dim_from_weights: of which file? Theirs needs --network_weights")
        rates = sorted(_RATES & arguments.keys())
        require(not rates, f"--network_args {', '.join(rates)}: all layers have one learning rate here; leave it out")
        return [*flag("lora.kind", _kind(given.flags)), *flag("lora.rank", 0)]
    if module == lycoris.MODULE:
        return lycoris.words(arguments, given.flags.network_dim, given.flags.network_alpha)
    rank = given.flags.network_dim or _RANK
    layers = [*_LAYERS, *(_CONVOLUTIONS if _adapts_convolutions(given, arguments, rank) else ())]
    return [*flag("lora.rank", rank), *flag("lora.targets", layers)]


def _kind(flags: argparse.Namespace) -> str:
    """Return the kind of adapter; with --dim_from_weights LyCORIS takes that of the file."""
    if flags.network_module != lycoris.MODULE:
        return "lora"
    if flags.dim_from_weights:
        return kind_of_file(Path(absolute("--network_weights", flags.network_weights)))
    return lycoris.kind_of(_arguments(flags))


def _start(given: Given, path: str | None) -> list[str]:
    """Return the file of weights to start from; ConfigError: it is here, and of another kind than the run."""
    if path is None:
        return []
    file, kind = absolute("--network_weights", path), _kind(given.flags)
    found = kind_of_file(Path(file)) if Path(file).is_file() else kind
    require(
        found == kind,
        f"--network_weights {file}: an adapter of the kind {found}, expected {kind}; theirs leaves tensors of another "
        f"kind out, and so begins with another change. Give a file of this kind, or --network_module {lycoris.MODULE} "
        "--dim_from_weights, which takes the kind of the file",
    )
    return [*flag("lora.init", file), *flag("lora.skip_text_encoders", True)]


def _arguments(flags: argparse.Namespace) -> dict[str, str]:
    return dict(_pair(word) for word in flags.network_args or ())


def _pair(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    require(bool(equals), f"--network_args {word}: expected NAME=VALUE")
    return name, value


def _adapts_convolutions(given: Given, arguments: dict[str, str], rank: int) -> bool:
    unknown = sorted(arguments.keys() - {"conv_dim", "conv_alpha"})
    require(not unknown, f"--network_args {', '.join(unknown)}: all layers have one rank and one learning rate here")
    if "conv_dim" not in arguments:
        return False
    alpha, conv = given.flags.network_alpha, (arguments["conv_dim"], arguments.get("conv_alpha", str(_ALPHA)))
    if (float(conv[0]), float(conv[1])) != (rank, alpha):
        raise ConfigError(
            f"--network_args conv_dim={conv[0]} conv_alpha={conv[1]}: all layers have one rank and alpha here; give "
            f"those of --network_dim {rank} and --network_alpha {alpha:g}"
        )
    return True


def _alone(_: Given, on: bool) -> list[str]:
    require(on, f"without --network_train_unet_only theirs trains text encoders too: {_TEXT}")
    return []


def _format(flags: argparse.Namespace) -> str:
    """Return the format of a whole network: theirs is that of the base without --save_model_as."""
    folder = not str(flags.pretrained_model_name_or_path).endswith((".safetensors", ".ckpt", ".pt"))
    named = flags.save_model_as or ("diffusers" if folder else "safetensors")
    return "diffusers" if named.startswith("diffusers") else "single-file"


@dataclass(frozen=True, slots=True)
class _Written:
    """What the run leaves, by the kind of adapter."""

    format: str
    notes: tuple[str, ...]
    """How it differs from theirs."""


_BEGIN = (
    "A of each added layer begins normal with the deviation 1 / rank; theirs uniform by Kaiming's rule; B at 0 in both"
)
_NAME = "its name is pytorch_lora_weights.safetensors"
_ALPHA_BESIDE = f"the file has alpha as a tensor of each layer, as theirs has; {_NAME}"
_WRITTEN: Mapping[str, _Written] = {
    "lora": _Written("lora", (_BEGIN, _ALPHA_BESIDE)),
    "dora": _Written(
        "lora-native",
        (
            _BEGIN,
            "the norm of each changed row counts as a constant in the gradient (section 4.3 of the paper of DoRA); "
            "theirs differentiates it",
            "the file is for ComfyUI, which has another rule for magnitudes than theirs; `fastdiff export --format "
            f"lora-diffusers` writes one for diffusers; {_NAME}",
        ),
    ),
    "lokr": _Written("lora", (_ALPHA_BESIDE,)),
}


def _notes(flags: argparse.Namespace) -> list[str]:
    read = flags.network_module == lycoris.MODULE and not flags.dim_from_weights
    own = lycoris.told(_arguments(flags)) if read else []
    return [*_WRITTEN[_kind(flags)].notes, *own]


_SAFE = "files are safetensors: pickles are not written"
_NETWORK: dict[str, Meaning] = {
    "network_module": Meaning(str, _network),
    "network_dim": Meaning(
        count, idle=f"networks.lora has {_RANK} without it, and with --dim_from_weights the rank of the file"
    ),
    "network_alpha": Meaning(
        float, lambda given, alpha: flag("lora.alpha", None if given.flags.dim_from_weights else alpha or None)
    ),
    "network_args": Meaning(several="*"),
    "network_dropout": Meaning(float, refused="outputs of the added matrices are not dropped; leave it out"),
    "network_weights": Meaning(
        str,
        _start,
        told="the run starts with the change that the file means, without its text encoders; theirs scales it by "
        "--network_alpha anew, unless --dim_from_weights is given",
    ),
    "dim_from_weights": Meaning(SWITCH),
    "network_train_unet_only": Meaning(SWITCH, _alone),
    "network_train_text_encoder_only": Meaning(SWITCH, refused=_TEXT),
    "scale_weight_norms": Meaning(float, refused="norms of the added matrices are not bounded; leave it out"),
    "base_weights": Meaning(refused=_BASE, several="*"),
    "base_weights_multiplier": Meaning(float, refused=_BASE, several="*"),
    "unet_lr": Meaning(float, idle="it is that of --learning_rate"),
    "text_encoder_lr": Meaning(float, told="text encoders are not trained, in theirs neither", several="*"),
    "fp8_base": Meaning(
        SWITCH,
        lambda given, on: flag("lora.quantize", "8bit" if on or given.flags.fp8_base_unet else None),
        told="the frozen matrices are in 8-bit integers",
    ),
    "fp8_base_unet": Meaning(SWITCH, told="the frozen matrices of the UNet are in 8-bit integers"),
    "cpu_offload_checkpointing": Meaning(SWITCH, told="activations are computed again, and none is moved to the host"),
    "no_metadata": Meaning(SWITCH, told="a file of weights has few metadata, none of them private"),
    "save_model_as": Meaning(told=_SAFE, choices=(None, "ckpt", "pt", "safetensors")),
    "training_comment": Meaning(told="the model card has facts of the run alone; add it to OUT/README.md"),
}
_FULL: dict[str, Meaning] = {
    "fp8_base": Meaning(SWITCH, told="all weights are trained, so none is frozen in 8 bits; theirs does not read it"),
    "train_text_encoder": Meaning(SWITCH, refused="text encoders are not trained here; leave it out"),
    "learning_rate_te1": Meaning(float, idle="it belongs to --train_text_encoder"),
    "learning_rate_te2": Meaning(float, idle="it belongs to --train_text_encoder"),
    "diffusers_xformers": Meaning(SWITCH, told="see --xformers"),
    "use_safetensors": Meaning(SWITCH, told=_SAFE),
    "save_model_as": Meaning(choices=(None, "ckpt", "safetensors", "diffusers", "diffusers_safetensors")),
    "block_lr": Meaning(refused="all layers have one learning rate here; leave it out"),
    "fused_optimizer_groups": Meaning(int, told="gradients are sharded by ZeRO instead: see --deepspeed_config zero2"),
}


def _own(meanings: dict[str, Meaning], **values: object) -> Defaults:
    """Return the defaults of a script's own flags: off, None, or those given."""
    return {name: False if meaning.kind is SWITCH else None for name, meaning in meanings.items()} | values


SDXL_NETWORK = KohyaScript(
    defaults={**_ALL, **_own(_NETWORK, network_alpha=1, save_model_as="safetensors"), **_OF_NETWORKS},
    own=_NETWORK,
    always=(flag("preset", "sdxl-lora"), flag("validation.captions", 0), flag("ema.rates", ())),
    export=lambda flags: _WRITTEN[_kind(flags)].format,
    notes=_notes,
)
SDXL_FULL = KohyaScript(
    defaults={**_BOTH, **_own(_FULL)},
    own=_FULL,
    always=(flag("preset", "sdxl-finetune"), flag("ema.rates", ())),
    export=_format,
)
