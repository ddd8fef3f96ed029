"""A trained network as a pipeline in the layout of diffusers."""

import importlib.metadata
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.objective import PREDICTION_TYPES, DdpmConfig, FlowConfig, ObjectiveConfig
from fastdiff.errors import ConfigError, require
from fastdiff.export.card_text import Place, drawing, from_pretrained, load_safetensors, python
from fastdiff.export.diffusers_model import WEIGHTS, Source, write_model
from fastdiff.export.formats import Exported, ExportFormat
from fastdiff.export.schedulers import noise_of, write_json
from fastdiff.export.weights import ExportedWeights
from fastdiff.models.family import family_of
from fastdiff.models.load import pretrained
from fastdiff.models.pipeline_files import DESCRIPTIONS, INDEX
from fastdiff.models.pretrained.pipeline import Pretrained

_OPTIONAL = ("safety_checker", "feature_extractor", "image_encoder")
"""Optional parts of a pipeline."""
_LIBRARIES = ("diffusers", "transformers", "stable_diffusion")
"""Libraries of parts that diffusers loads; the last one is a module of its own, with the safety checker."""


def write_pipeline(folder: Path, weights: ExportedWeights, config: RunConfig, dtype: torch.dtype) -> None:
    """Write ``unet/`` or ``transformer/`` and, if the run has a pretrained pipeline, the rest of a complete pipeline.

    The other parts are copied from there unchanged, in their dtype. The scheduler gets the noise schedule and the
    prediction type of the run.

    Args:
        folder: exists and is empty.
        weights: of the network.
        config: the run's.
        dtype: of the network's weights.

    Raises:
        ConfigError: the pretrained pipeline or a required part of it is missing, or no pipeline supports the
            objective of the run, or that of the run cannot draw with the network.
        OSError: a file cannot be written, for example because the disk is full.
    """
    model, part = config.model, family_of(config.model).pipeline_part
    pipeline = pretrained(config.pretrained) if config.pretrained.path else None
    index = dict(pipeline.json(INDEX)) if pipeline else {}
    scheduler = scheduler_config(pipeline.scheduler_config(), config.objective) if pipeline else {}
    if pipeline:
        _require_drawable(model, str(index.get("_class_name", "")))
    sources = {name: Source(name) for name in weights.shapes}
    write_model(folder / part, model.diffusers_class, model.to_diffusers(), sources, weights, dtype)
    if pipeline is None:
        return
    (folder / "scheduler").mkdir()
    write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    library = index[part][0] if part in index else "diffusers"
    index |= {part: [library, model.diffusers_class], "scheduler": ["diffusers", scheduler["_class_name"]]}
    for other in _parts(index).keys() - {part, "scheduler"}:
        if not copy_part(pipeline, other, folder / other):
            index[other] = [None, None]
    write_json(folder / INDEX, index)


def _require_drawable(network: ModelConfig, pipeline: str) -> None:
    problem = network.problem_in(pipeline)
    require(
        problem is None,
        f"--format diffusers: {pipeline} could not draw: {problem}; export the network alone with --format "
        "safetensors, or draw with `fastdiff sample`",
    )


def scheduler_config(base: Mapping[str, Any], objective: ObjectiveConfig) -> dict[str, Any]:
    """Return a ``scheduler_config.json`` with the noise schedule and the prediction type of a run.

    It keeps the scheduler of the pretrained pipeline, with two exceptions that many schedulers get wrong and that
    become DDIM: prediction of x0, and a schedule that ends in pure noise, which must also be sampled from its last step
    (Lin et al. 2023, arXiv:2305.08891, sections 3.1 and 3.3). ConfigError: no scheduler of such a pipeline supports the
    process or the prediction of the run.

    A pipeline of flow matching keeps its scheduler, which has no more than the time shift of drawing.
    """
    if is_flow(objective) and str(base.get("_class_name", "")).startswith("FlowMatch"):
        return dict(base)
    if not isinstance(objective, DdpmConfig) or objective.predicted not in PREDICTION_TYPES:
        raise ConfigError(
            f"--format diffusers: {base.get('_class_name', 'the scheduler of the pipeline')} draws with the linear "
            "velocity of flow if its name begins with FlowMatch, otherwise with epsilon, v or x0 at discrete steps; "
            f"the run has --objective.process {objective.process} --objective.prediction {objective.predicted}; use "
            "--format safetensors, or `fastdiff sample`"
        )
    noise = {
        "num_train_timesteps": objective.timesteps,
        **noise_of(objective),
        "prediction_type": PREDICTION_TYPES[objective.predicted],
    }
    zero = objective.ends_in_noise
    if not zero and objective.predicted != "x0":
        return {**base, **noise} | ({"rescale_betas_zero_snr": False} if "rescale_betas_zero_snr" in base else {})
    return {
        "_class_name": "DDIMScheduler",
        "_diffusers_version": importlib.metadata.version("diffusers"),
        **noise,
        "clip_sample": False,
        "set_alpha_to_one": False,
        "steps_offset": 1,
        "rescale_betas_zero_snr": objective.zero_terminal_snr,
        "timestep_spacing": "trailing" if zero else "leading",
    }


def is_flow(objective: ObjectiveConfig) -> bool:
    """Whether diffusers' schedulers of flow matching can draw with the network: it predicts the linear velocity."""
    return isinstance(objective, FlowConfig) and objective.path == "linear" and objective.predicted == "flow"


def copy_part(pipeline: Pretrained, part: str, target: Path) -> bool:
    """Copy configuration and weights of a part, under names without a variant; False: an optional part has none."""
    source, variant, required = pipeline.folder_of(part), pipeline.variant, part not in _OPTIONAL
    if not source.is_dir():
        if required:
            raise ConfigError(f"{source} is missing, a required part of the pipeline {pipeline.path}; restore it")
        return False
    weights = pipeline.weight_files(part, required=required) if pipeline.has_weights(part) else []
    if pipeline.has_weights(part) and not weights:
        return False
    target.mkdir()
    for path in weights:
        shutil.copyfile(path, target / _plain(path.name, variant))
    in_several = any("-of-" in path.name for path in weights)
    of_variant = any(_is_of(variant, path.name) for path in weights)
    for path in sorted(source.iterdir()):
        if ".index." in path.name:  # maps weights to files
            if in_several and "safetensors" in path.name and _is_of(variant, path.name) == of_variant:
                (target / _plain(path.name, variant)).write_text(_plain(path.read_text(), variant))
        elif path.suffix in DESCRIPTIONS:
            shutil.copyfile(path, target / path.name)
    return True


def _is_of(variant: str | None, name: str) -> bool:
    """Match ``model.VARIANT.safetensors``, ``model.VARIANT-00001-of-00002.safetensors``, or the index."""
    return variant is not None and (f".{variant}." in name or f".{variant}-" in name)


def _plain(text: str, variant: str | None) -> str:
    return text.replace(f".{variant}.", ".").replace(f".{variant}-", "-") if variant else text


def _write(folder: Path, exported: Exported) -> None:
    write_pipeline(folder, exported.weights, exported.config, exported.dtype)


def _use(config: RunConfig, place: Place, step: int) -> str:
    kind, part = config.model.diffusers_class, family_of(config.model).pipeline_part
    if config.pretrained.path:
        index: Mapping[str, Any] = {}
        with suppress(ConfigError):  # of a card alone, without the pipeline
            index = pretrained(config.pretrained).json(INDEX)
        code = python(from_pretrained(str(place)) + drawing(config))
        if not (others := _of_others(index)):
            return code
        import diffusers

        whole, parts = index.get("_class_name", ""), ", ".join(others)
        if whole in dir(diffusers):  # which does not import it
            return f"{code}\nFirst install the packages of its parts: {parts}.\n"
        weights = load_safetensors(config.model, config.objective, place, f"{part}/{WEIGHTS}")
        return (
            f"diffusers has no `{whole}`, the class of this pipeline: `DiffusionPipeline.from_pretrained` cannot load "
            f"it. Load it by the packages of its parts: {parts}. The weights of the network:\n\n{weights}"
        )
    return python(f'from diffusers import {kind}\n\n{part} = {kind}.from_pretrained("{place}", subfolder="{part}")')


def _of_others(index: Mapping[str, Any]) -> list[str]:
    """Return the parts of a pipeline that are neither of diffusers nor of transformers, with their classes."""
    parts = _parts(index)
    return [f"`{part}` is `{library}.{name}`" for part, (library, name) in parts.items() if library not in _LIBRARIES]


def _parts(index: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return library and class of each part of a pipeline that is there; other values of the index are options."""
    found = {}
    for part, entry in index.items():
        match entry:
            case [str(library), str(name)] if not part.startswith("_"):
                found[part] = (library, name)
    return found


DIFFUSERS = ExportFormat(write=_write, use=_use, library="diffusers")
