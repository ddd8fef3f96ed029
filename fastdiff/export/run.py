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

from fastdiff.checkpoint.power_function import constant_name, in_words
from fastdiff.checkpoint.reader import Checkpoint
from fastdiff.checkpoint.weights import AS_TRAINED
from fastdiff.config.run import RunConfig
from fastdiff.errors import ConfigError, StorageError, require
from fastdiff.export.card_text import Place
from fastdiff.export.formats import Exported, ExportFormat, format_of, formats_of
from fastdiff.export.model_card import write_card
from fastdiff.export.weights import ExportedWeights, exported_weights
from fastdiff.files import fsync
from fastdiff.models.kernel_choice import DTYPES
from fastdiff.sampling.run import config_of, open_saved


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Which weights of a run are exported, and how."""

    format: str
    """diffusers: a pipeline, or the network alone if the run has none. lora: the adapter. dit: the weights of the
    published DiT. dit-training, iddpm: all that DiT and improved-diffusion keep of a training, with weights, average
    and optimizer, in fp32. safetensors: a plain state dict. Networks of other packages may have more. In
    those that are not lora, an adapter is added to the weights that it was trained on: W + alpha / rank * B A, also if
    these were quantized in the training."""
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
    saved = open_saved(run, choice.step, snapshots=choice.ema_std is not None)
    config = config_of(saved)
    form = _checked(choice, config)
    if form.training and choice.ema_std is not None:
        saved = open_saved(run, choice.step)  # a snapshot does not have all of a training
    weights = exported_weights(
        saved, config, ema=choice.ema, raw=choice.raw, merge=not form.adapter, ema_std=choice.ema_std
    )
    with _new_folder(out) as folder:
        form.write(folder, Exported(saved, config, weights, DTYPES[choice.dtype]))
        if form.training:
            weights = replace(weights, description=_all_of(form, saved, weights))
        write_card(folder, run, saved, weights, choice.format, choice.dtype, Place(out, published_as))


def _checked(choice: Choice, config: RunConfig) -> ExportFormat:
    """The format; ConfigError if the run cannot have it, or it has not what else is chosen."""
    name = choice.format
    if name == "lora":
        instead = next(iter(formats_of(config.model)))
        require(config.lora.rank > 0, f"--format lora: the run trained all weights, there is no adapter; use {instead}")
    found = format_of(config.model, name)
    if found.training:
        require(choice.dtype == "fp32", f"--dtype {choice.dtype}: the files of --format {name} are in fp32")
        require(not choice.raw, f"--raw: --format {name} has the weights themselves, beside their averages")
    which = "--ema" if choice.ema is not None else "--ema-std" if choice.ema_std is not None else None
    require(not found.every_average or which is None, f"{which}: --format {name} has every average of a constant rate")
    return found


def _all_of(found: ExportFormat, saved: Checkpoint, weights: ExportedWeights) -> str:
    """What the files of a training hold, in words."""
    averages = [in_words(constant_name(rate)) for rate in saved.ema_rates]
    return ", ".join([AS_TRAINED, *(averages if found.every_average else [weights.description])])


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
