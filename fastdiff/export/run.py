"""A trained run in the formats of other programs, with a model card.

The weights go from the checkpoint to the new files one tensor at a time. A folder appears under its name when it is
complete and on the disk, or not at all.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from fastdiff.checkpoint.power_function import constant_name, in_words
from fastdiff.checkpoint.reader import Checkpoint
from fastdiff.checkpoint.safetensors_writer import write_tensors
from fastdiff.checkpoint.weights import AS_TRAINED
from fastdiff.config.networks.adm import AdmConfig
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.run import RunConfig
from fastdiff.console import log
from fastdiff.errors import ConfigError, StorageError, require
from fastdiff.export.diffusers_adm import write_unet2d
from fastdiff.export.diffusers_dit import write_transformer
from fastdiff.export.model_card import Place, other_norms, write_card
from fastdiff.export.original_checkpoint import write_dit, write_dit_training, write_iddpm
from fastdiff.export.pipeline import write_pipeline
from fastdiff.export.weights import ExportedWeights, exported_weights
from fastdiff.files import fsync
from fastdiff.models.kernel_choice import DTYPES
from fastdiff.sampling.run import config_of, open_saved

Format = Literal["diffusers", "lora", "dit", "dit-training", "iddpm", "safetensors"]

_TRAININGS = ("dit-training", "iddpm")
_ONLY = {"dit": "dit", "dit-training": "dit", "iddpm": "adm"}
"""Formats that one kind of network has."""
_NETWORKS = {"dit": "a DiT", "unet": "a UNet of Stable Diffusion", "adm": "an ADM UNet"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Which weights of a run are exported, and how."""

    format: Format
    """diffusers: a pipeline, or the network alone if the run has none. lora: the adapter. dit: the weights of the
    published DiT. dit-training, iddpm: all that DiT and improved-diffusion keep of a training, with weights, average
    and optimizer, in fp32. safetensors: a plain state dict. In those that are not lora, an adapter is added to the
    weights that it was trained on: W + alpha / rank * B A, also if these were quantized in the training."""
    ema: float | None = None
    """Decay rate of the average; None, and no ``ema_std``: the first one, or the weights if there is none."""
    ema_std: float | None = None
    """Relative width of a power-function average: the run's own, or made from its snapshots."""
    raw: bool = False
    """The weights themselves instead of an average."""
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Of the exported weights."""
    step: int | None = None
    """Which checkpoint, for ``ema_std`` also which snapshot; None: the newest intact checkpoint."""


def export(run: Path, out: Path, choice: Choice, *, published_as: str | None = None) -> None:
    """Write the weights of a run, and a model card ``README.md``, to a new folder.

    Args:
        run: run folder.
        out: must not exist.
        choice: what is written.
        published_as: id on the Hugging Face hub that the examples of the card use; None: ``out``.

    Raises:
        ConfigError: ``out`` exists, or the run cannot be exported in this format.
        StorageError: a file could not be read or written; ``out`` does not exist.
    """
    if out.exists():
        raise ConfigError(f"{out} exists; export to a new folder, or delete it")
    training = choice.format in _TRAININGS
    saved = open_saved(run, choice.step, snapshots=choice.ema_std is not None and not training)
    config = config_of(saved)
    _check(choice, config)
    weights = exported_weights(
        saved, config, ema=choice.ema, raw=choice.raw, merge=choice.format != "lora", ema_std=choice.ema_std
    )
    with _new_folder(out) as folder:
        _write(folder, choice, saved, config, weights)
        if training:
            weights = replace(weights, description=_all_of(choice, saved, weights))
        write_card(folder, run, saved, weights, choice.format, choice.dtype, Place(out, published_as))


def _check(choice: Choice, config: RunConfig) -> None:
    """ConfigError if the run cannot have the format, or the format not what else is chosen."""
    name, kind = choice.format, config.model.kind
    if name == "lora":
        require(config.lora.rank > 0, "--format lora: the run trained all weights, there is no adapter; use diffusers")
    own = [form for form, network in _ONLY.items() if network == kind]
    require(
        _ONLY.get(name, kind) == kind,
        f"--format {name} is for {_NETWORKS[_ONLY.get(name, kind)]}, the run has {_NETWORKS[kind]}; use "
        f"{', '.join(['diffusers', *own])} or safetensors",
    )
    if name in _TRAININGS:
        require(choice.dtype == "fp32", f"--dtype {choice.dtype}: the files of --format {name} are in fp32")
        require(not choice.raw, f"--raw: --format {name} has the weights themselves, beside their averages")
    which = "--ema" if choice.ema is not None else "--ema-std" if choice.ema_std is not None else None
    require(name != "iddpm" or which is None, f"{which}: --format iddpm has every average of a constant rate")


def _all_of(choice: Choice, saved: Checkpoint, weights: ExportedWeights) -> str:
    """What the files of a training hold, in words."""
    averages = [in_words(constant_name(rate)) for rate in saved.ema_rates]
    return ", ".join([AS_TRAINED, *(averages if choice.format == "iddpm" else [weights.description])])


def _write(folder: Path, choice: Choice, saved: Checkpoint, config: RunConfig, weights: ExportedWeights) -> None:
    dtype = DTYPES[choice.dtype]
    match choice.format:
        case "diffusers":
            _write_diffusers(folder, weights, config, dtype)
        case "lora":
            _write_lora(folder, weights, config, dtype)
        case "dit":
            write_dit(folder, weights, config, dtype)
        case "dit-training":
            write_dit_training(folder, saved, config, weights)
        case "iddpm":
            assert isinstance(config.model, AdmConfig)
            write_iddpm(folder, saved, config)
            if other := other_norms(config.model):
                log.warning(other)
        case "safetensors":
            write_tensors(folder / "model.safetensors", weights.shapes, dtype, weights.reader(dtype))


def _write_diffusers(folder: Path, weights: ExportedWeights, config: RunConfig, dtype: torch.dtype) -> None:
    if isinstance(config.model, DiTConfig):
        write_transformer(folder, weights, config.model, dtype)
    elif isinstance(config.model, AdmConfig):
        write_unet2d(folder, weights, config.model, dtype)
    else:
        write_pipeline(folder, weights, config, dtype)


def _write_lora(folder: Path, weights: ExportedWeights, config: RunConfig, dtype: torch.dtype) -> None:
    from safetensors import SafetensorError, safe_open

    from fastdiff.models.lora import save_lora

    read = weights.reader(dtype)
    try:
        file = save_lora(folder, {name: read(name).to(dtype) for name in weights.shapes}, config.lora, config.model)
    except SafetensorError as error:
        raise StorageError(f"{folder}: the adapter could not be written ({error}); make room") from None
    # Again, because the library writes the entries of the metadata in another order each time.
    with safe_open(file, framework="pt") as saved:
        metadata, names = saved.metadata(), saved.keys()
        shapes = {name: tuple(saved.get_slice(name).get_shape()) for name in names}
        write_tensors(folder / "sorted.safetensors", shapes, dtype, saved.get_tensor, metadata)
    (folder / "sorted.safetensors").replace(file)


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside ``out`` that becomes it at the end; after an error nothing is left of it."""
    temporary = out.with_name(f"{out.name}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if temporary.exists():  # of an export that was killed
            shutil.rmtree(temporary)
        temporary.mkdir()
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            fsync(path)
        temporary.rename(out)
        fsync(out.parent)
    except OSError as error:
        free = shutil.disk_usage(out.parent).free if out.parent.exists() else 0
        raise StorageError(
            f"{error.filename or out}: {error.strerror or error} ({free / 2**20:.1f} MiB are free); {out} is not "
            "written: make room, or export to another disk"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
