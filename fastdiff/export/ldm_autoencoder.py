"""Conversion of an autoencoder in the layout of latent diffusion to ``AutoencoderKL`` of diffusers.

VA-VAE (Yao & Wang 2025, arXiv:2501.01423) and the autoencoders of REPA-E (Leng et al. 2025, arXiv:2504.10483) have it:
a file ``.pt``, ``.ckpt`` or ``.safetensors`` with the names of Rombach et al. 2022 (``encoder.down.0.block.0``,
``encoder.mid.attn_1``), its weights alone or under ``state_dict``. The configuration follows from the shapes. Weights
outside of ``encoder``, ``decoder`` and the two convolutions beside them, such as a loss or a teacher, are left out.

This is tested on random weights under these names, against a plain rendering of the network. That the published files
have no others is not verified here; a file that has is refused with their names.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastdiff.console import log, show
from fastdiff.data.encoding.statistics import statistics_of_file
from fastdiff.errors import ConfigError, StorageError, remedy, require
from fastdiff.export.original_names import autoencoder_weight
from fastdiff.files import is_free, unfinished_folder
from fastdiff.models.pipeline_files import tensors_of
from fastdiff.models.pretrained.pickles import check_size, read_published, state_dict
from fastdiff.models.pretrained.pipeline import Pretrained

_PARTS = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.")
_PREFIX = "first_stage_model."
"""Of an autoencoder in a checkpoint of Stable Diffusion."""
_GROUPS = 32
_PLACE = re.compile(r"(encoder\.down|decoder\.up)\.(\d+)\.(block|attn)\.(\d+)\.")


def convert_autoencoder(file: Path, out: Path, statistics: str | None = None, scale: float | None = None) -> None:
    """Write a folder that ``fastdiff encode --pretrained`` and diffusers read.

    Args:
        file: The published file.
        out: New or empty folder.
        statistics: File with mean and deviation of its latents per channel, which become ``latents_mean`` and
            ``latents_std``; None: it has none, so that they are measured while encoding, unless ``scale`` is given.
        scale: Factor of its latents, which become x0 without a shift (``scaling_factor``).

    Raises:
        ConfigError: The file is no such autoencoder, or ``out`` is taken.
        StorageError: A file cannot be read or written.
    """
    require(is_free(out), f"{out} exists; choose another folder, or delete it")
    found, others = _weights(file)
    config = _configuration(found, file) | {"scaling_factor": scale}
    module = _module(config, found, file)
    try:
        with unfinished_folder(out) as folder:
            module.save_pretrained(folder)
            if statistics is not None:
                known = statistics_of_file(statistics, Pretrained(str(folder)).latent_space)
                deviations = [1 / each for each in known.scale]
                module.register_to_config(latents_mean=list(known.shift), latents_std=deviations, scaling_factor=1.0)
                module.save_config(folder)
    except OSError as error:
        raise StorageError(
            f"cannot write {error.filename or out}: {error.strerror or error}; {remedy(error)}"
        ) from None
    if others:
        named = ", ".join(f"{name} ({count})" for name, count in others.items())
        log.info(f"{file}: weights of other parts were left out: {named}")
    levels, channels = len(config["block_out_channels"]), config["latent_channels"]
    told = "" if statistics or scale else "; its latents are measured by `fastdiff encode`"
    show(f"{out} is an AutoencoderKL of {channels} channels and {2 ** (levels - 1)} pixels per latent{told}")


def _weights(file: Path) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the weights of the autoencoder by their published names, and the number of others by the first part."""
    try:
        if file.suffix == ".safetensors":
            content = dict(tensors_of(file))
        else:
            whole = read_published(file)
            content = state_dict(whole.get("state_dict", whole), "expected a state dict, or one under 'state_dict'")
            check_size(content.values(), file)
    except OSError as error:
        raise StorageError(f"{file} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{file} cannot be used: {error}") from None
    named = {name.removeprefix(_PREFIX): value for name, value in content.items()}
    own = {name: value.float() for name, value in named.items() if name.startswith(_PARTS)}
    others: dict[str, int] = {}
    for name in named.keys() - own.keys():
        part = name.split(".")[0]
        others[part] = others.get(part, 0) + 1
    return own, dict(sorted(others.items()))


def _configuration(weights: Mapping[str, Tensor], file: Path) -> dict[str, Any]:
    """Return the configuration of ``AutoencoderKL`` that the names and shapes say."""
    places = [match for match in map(_PLACE.match, weights) if match is not None]
    levels = 1 + max((int(match[2]) for match in places), default=-1)
    needed = ("encoder.conv_in.weight", "encoder.conv_out.weight", "decoder.conv_out.weight")
    missing = [name for name in needed if name not in weights] + ([] if levels else ["encoder.down.0.block.0"])
    require(
        not missing,
        f"{file} has no {', '.join(missing)}; expected an autoencoder in the layout of latent diffusion, as VA-VAE's",
    )
    blocks = 1 + max(int(match[4]) for match in places if match[1] == "encoder.down")
    widths = [weights[f"encoder.down.{level}.block.0.conv2.weight"].shape[0] for level in range(levels)]
    down, up = (
        [
            (part, str(level)) in {(match[1], match[2]) for match in places if match[3] == "attn"}
            for level in range(levels)
        ]
        for part in ("encoder.down", "decoder.up")
    )
    return {
        "in_channels": weights["encoder.conv_in.weight"].shape[1],
        "out_channels": weights["decoder.conv_out.weight"].shape[0],
        "down_block_types": ["AttnDownEncoderBlock2D" if has else "DownEncoderBlock2D" for has in down],
        "up_block_types": ["AttnUpDecoderBlock2D" if has else "UpDecoderBlock2D" for has in reversed(up)],
        "block_out_channels": widths,
        "layers_per_block": blocks,
        "latent_channels": weights["decoder.conv_in.weight"].shape[1],
        "norm_num_groups": _GROUPS,
        "use_quant_conv": "quant_conv.weight" in weights,
        "use_post_quant_conv": "post_quant_conv.weight" in weights,
        "mid_block_add_attention": "encoder.mid.attn_1.q.weight" in weights,
    }


def _module(config: Mapping[str, Any], weights: Mapping[str, Tensor], file: Path) -> Any:
    """Return the module with all weights of the file, in fp32."""
    from diffusers import AutoencoderKL

    try:
        with torch.device("meta"):
            module = AutoencoderKL(**config)
    except ValueError as error:
        raise ConfigError(f"{file} is no autoencoder that diffusers has: {error}") from None
    expected = dict(module.state_dict())
    names = {name: autoencoder_weight(name, len(config["block_out_channels"])) for name in expected}
    unknown, missing = weights.keys() - set(names.values()), set(names.values()) - weights.keys()
    for what, which in (("more weights than AutoencoderKL", unknown), ("not all of its weights", missing)):
        require(not which, f"{file} has {what}: {', '.join(sorted(which)[:3])} ({len(which)})")
    module.load_state_dict(dict(_renamed(names, weights, expected, file)), assign=True)
    return module.eval()


def _renamed(
    names: Mapping[str, str], weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], file: Path
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights under the names of diffusers; attention has 1x1 convolutions in the original."""
    for name, theirs in names.items():
        value, shape = weights[theirs], expected[name].shape
        if value.shape == (*shape, 1, 1):
            value = value[:, :, 0, 0]
        require(
            value.shape == shape,
            f"{file}: {theirs} has the shape {list(value.shape)}, expected {list(shape)} by the other weights",
        )
        yield name, value.contiguous()
