"""A trained run in the formats of other programs, with a model card.

The weights go from the checkpoint to the new files one tensor at a time. A folder appears under its name when it is
complete and on the disk, or not at all.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fastdiff.backends import DTYPES
from fastdiff.config import RunConfig
from fastdiff.durable import fsync
from fastdiff.errors import ConfigError, StorageError
from fastdiff.export_weights import ExportedWeights, exported_weights
from fastdiff.model_card import Place, write_card
from fastdiff.model_config import DiTConfig, UNetConfig
from fastdiff.pipeline_export import write_pipeline
from fastdiff.safetensors_stream import write_tensors
from fastdiff.trained import config_of, open_saved

Format = Literal["diffusers", "lora", "dit", "safetensors"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Which weights of a run are exported, and how."""

    format: Format
    """diffusers: a pipeline, or a UNet alone if the run has none. lora: the adapter. dit: the file of the published
    DiT. safetensors: a plain state dict. In the three that are not lora, an adapter is added to the weights that it
    was trained on: W + alpha / rank * B A, also if these were quantized in the training."""
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
    write = _writer(choice.format, config)
    weights = exported_weights(
        saved, config, ema=choice.ema, raw=choice.raw, merge=choice.format != "lora", ema_std=choice.ema_std
    )
    with _new_folder(out) as folder:
        write(folder, weights, config, DTYPES[choice.dtype])
        write_card(folder, run, saved, weights, choice.format, choice.dtype, Place(out, published_as))


_Writer = Callable[[Path, ExportedWeights, RunConfig, torch.dtype], None]


def _writer(name: Format, config: RunConfig) -> _Writer:
    """What writes a format; ConfigError if the run cannot have it."""
    if name == "lora":
        if not config.lora.rank:
            raise ConfigError("--format lora: the run trained all weights, there is no adapter; use diffusers")
        return _write_lora
    if name == "diffusers":
        if not isinstance(config.model, UNetConfig):
            raise ConfigError("--format diffusers is for UNets, the run has a DiT; use dit or safetensors")
        return write_pipeline
    if name == "dit":
        if not isinstance(config.model, DiTConfig):
            raise ConfigError("--format dit is for DiT, the run has a UNet; use diffusers or safetensors")
        return _write_dit
    return _write_safetensors


def _write_safetensors(folder: Path, weights: ExportedWeights, config: RunConfig, dtype: torch.dtype) -> None:
    write_tensors(folder / "model.safetensors", weights.shapes, dtype, weights.reader(dtype))


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


def _write_dit(folder: Path, weights: ExportedWeights, config: RunConfig, dtype: torch.dtype) -> None:
    """``dit.pt`` with the state dict under ``ema``, as published.

    A pickle is written from tensors that are all there at once: they lie in a scratch file, mapped into memory, so
    that this takes the room twice on the disk and not in memory.
    """
    from safetensors import safe_open

    from fastdiff.models.embeddings import position_table

    assert isinstance(config.model, DiTConfig)
    scratch = folder / "scratch.safetensors"
    write_tensors(scratch, weights.shapes, dtype, weights.reader(dtype))
    with safe_open(scratch, framework="pt") as file:
        state: dict[str, Tensor] = {name: file.get_tensor(name) for name in weights.shapes}
    state["pos_embed"] = position_table(config.model.hidden, config.model.size // config.model.patch).to(dtype)
    try:
        with (folder / "dit.pt").open("wb") as published:
            torch.save({"ema": state}, published)
    except RuntimeError as error:  # what torch makes of a full disk
        raise StorageError(
            f"{folder / 'dit.pt'}: could not be written ({str(error).splitlines()[0]}); make room, twice the size of "
            "the weights, or export to another disk"
        ) from None
    scratch.unlink()


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
