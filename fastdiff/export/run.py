"""Export of a trained run, or of published weights, to the formats of other programs, with a model card.

The weights are copied from the checkpoint one tensor at a time. The folder appears under its name only when it is
complete and on the disk.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fastdiff.checkpoint.power_function import constant_name, in_words
from fastdiff.checkpoint.reader import Checkpoint
from fastdiff.checkpoint.weights import AS_TRAINED
from fastdiff.config.networks.pretrained import LoraConfig
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.run import RunConfig
from fastdiff.console import log
from fastdiff.errors import ConfigError, StorageError, remedy, require
from fastdiff.export.card_text import Place
from fastdiff.export.formats import Exported, ExportFormat, format_of, formats_of
from fastdiff.export.model_card import files_in, files_of_export, write_card
from fastdiff.export.weights import exported_weights, published_weights
from fastdiff.files import is_free, unfinished_folder
from fastdiff.models.kernel_choice import DTYPES
from fastdiff.models.load import resolve
from fastdiff.sampling.latent_statistics import STATISTICS, statistics_in, write_statistics
from fastdiff.sampling.run import config_of, open_checkpoint, refuse_selection
from fastdiff.sanitize import escape


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Selection of the exported weights, and their format."""

    format: str
    """diffusers: a pipeline, or only the network if the run has none. single-file: the same as one checkpoint in the
    layout of the original Stable Diffusion. lora: the adapter; lora-diffusers, lora-native, lora-kohya: under the
    names of these programs (``models.adapter_files``). dit: the weights of the published DiT. dit-training, iddpm: the
    full training state of DiT and improved-diffusion, with weights, average and optimizer, in fp32. safetensors: a
    plain state dict. Networks of other packages may have more. All formats except those of an adapter merge it into
    its base weights: W + alpha / rank * B A, also if these were quantized during the training."""
    ema: float | None = None
    """Decay rate of the average; without it and ``ema_std`` the first EMA, or the raw weights if there is none."""
    ema_std: float | None = None
    """Relative std of a power-function average: a saved one, or one reconstructed from the snapshots."""
    raw: bool = False
    """Export the raw weights instead of an average."""
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Dtype of the exported weights."""
    step: int | None = None
    """Step of the checkpoint, with ``ema_std`` also of a snapshot; None: the newest intact checkpoint."""


def export(
    run: Path,
    out: Path,
    choice: Choice,
    *,
    published: RunConfig | None = None,
    repo_id: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write the weights of a run or of a published file, and a model card ``README.md``, to a new folder.

    Args:
        run: run folder, or the file.
        out: must not exist or be empty, but see ``overwrite``.
        choice: weights and format.
        published: configuration of the network in the file (``cli.published_weights``); None: a run.
        repo_id: Hugging Face hub id in the examples of the card; None: ``out``.
        overwrite: replace an earlier export in ``out``, when the new one is complete.

    Raises:
        ConfigError: ``out`` holds files, or the run cannot be exported in this format.
        StorageError: a file could not be read or written; ``out`` does not exist.
    """
    _check_place(out, overwrite)
    form, exported = _of_run(run, choice) if published is None else _of_file(run, resolve(published), choice)
    with _new_folder(out, replace=overwrite) as folder:
        form.write(folder, exported)
        if exported.saved is not None and (found := statistics_in(exported.saved.manifest)) is not None:
            write_statistics(folder, found)
        if form.training:
            exported = replace(exported, weights=replace(exported.weights, description=_all_of(form, exported)))
        write_card(folder, run, exported, choice.format, choice.dtype, Place(out, repo_id))


def _check_place(out: Path, overwrite: bool) -> None:
    """Refuse a place that is taken, unless by an empty folder or an earlier export that is to be replaced."""
    if is_free(out):
        return
    require(overwrite, f"{out} exists; export to a new folder, delete it, or replace an earlier export by --overwrite")
    known = None if out.is_symlink() else files_of_export(out)
    if known is None:
        raise ConfigError(f"--overwrite: {out} is no folder that fastdiff export wrote; choose another name")
    others = [name for name in files_in(out) if name not in known]
    require(
        not others,
        f"--overwrite: {out} has files that the export did not write ({', '.join(map(escape, others[:3]))}"
        f"{', ...' if len(others) > 3 else ''}); move them elsewhere, or choose another name",
    )


def _of_run(run: Path, choice: Choice) -> tuple[ExportFormat, Exported]:
    saved = open_checkpoint(run, choice.step, snapshots=choice.ema_std is not None)
    saved.require("progress", "classes", "parameters", "ema_rates", "dataset", "versions")
    config = _without_head(config_of(saved))
    form = _checked(choice, config.model, config.lora)
    if form.training and choice.ema_std is not None:
        saved = open_checkpoint(run, choice.step)  # a snapshot lacks the full training state
    weights = exported_weights(
        saved, config, ema=choice.ema, raw=choice.raw, merge=not form.adapter, ema_std=choice.ema_std
    )
    if statistics_in(saved.manifest) is not None:
        config = _without_autoencoder(config, form, saved)
    return form, Exported(saved, config, weights, DTYPES[choice.dtype])


def _without_head(config: RunConfig) -> RunConfig:
    """Return the run without the head for a teacher's features, which only the training has."""
    if not config.model.aligned_width:
        return config
    objective = replace(config.objective, alignment_weight=0.0, alignment_steps=0)
    head = {"aligned_width": 0, **({"aligned_token": False} if config.model.aligned_token else {})}
    return replace(config, model=replace(config.model, **head), objective=objective)


def _without_autoencoder(config: RunConfig, form: ExportFormat, saved: Checkpoint) -> RunConfig:
    """Return the run as one of unknown autoencoder: no pipeline of diffusers undoes statistics of the training data."""
    by_pipeline = bool(config.pretrained.path) and not config.pretrained.is_file
    require(
        not by_pipeline or not (form.adapter or form.library),
        f"{saved.folder} was trained on latents with statistics of their own, which the pipeline "
        f"{config.pretrained.path} does not undo; export the network alone with --format safetensors",
    )
    log.warning(
        f"the latents have statistics of their own, which no pipeline of diffusers undoes: the export has {STATISTICS} "
        "and no autoencoder"
    )
    return replace(config, data=replace(config.data, path="", autoencoder=None))


def _of_file(path: Path, config: RunConfig, choice: Choice) -> tuple[ExportFormat, Exported]:
    refuse_selection(path, ema=choice.ema, ema_std=choice.ema_std, raw=choice.raw, step=choice.step)
    form = _checked(choice, config.model, config.lora)
    require(not form.training, f"--format {choice.format}: {path} has no optimizer and no averages; choose another")
    return form, Exported(None, config, published_weights(config), DTYPES[choice.dtype])


def _checked(choice: Choice, network: ModelConfig, lora: LoraConfig) -> ExportFormat:
    """Return the format; ConfigError if it does not support the run or the other choices."""
    name = choice.format
    found = format_of(network, name)
    if found.adapter:
        instead = next(known for known in formats_of(network) if not format_of(network, known).adapter)
        require(lora.rank > 0, f"--format {name}: the run trained all weights and has no adapter; use {instead}")
    if found.training:
        require(choice.dtype == "fp32", f"--dtype {choice.dtype}: the files of --format {name} are in fp32")
        require(not choice.raw, f"--raw: --format {name} holds the raw weights in addition to the averages")
    which = "--ema" if choice.ema is not None else "--ema-std" if choice.ema_std is not None else None
    require(not found.every_average or which is None, f"{which}: --format {name} has every average of a constant rate")
    return found


def _all_of(found: ExportFormat, exported: Exported) -> str:
    """Describe the weights in the files of a training."""
    averages = [in_words(constant_name(rate)) for rate in exported.checkpoint.ema_rates]
    return ", ".join([AS_TRAINED, *(averages if found.every_average else [exported.weights.description])])


@contextmanager
def _new_folder(out: Path, *, replace: bool) -> Iterator[Path]:
    """Yield a folder that gets the name ``out`` at the end; after an error it is removed."""
    try:
        with unfinished_folder(out, replace=replace) as folder:
            yield folder
    except OSError as error:
        raise StorageError(
            f"{error.filename or out}: {error.strerror or error}; {out} is not written: {remedy(error)}"
        ) from None
