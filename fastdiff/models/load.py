"""Network of a run, built from its seed, pretrained weights or a checkpoint, with LoRA if configured."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, cast, get_args

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from fastdiff.config.networks.pretrained import LoraConfig, PretrainedConfig
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.objective import PREDICTION_TYPES, DdpmConfig, DdpmPrediction
from fastdiff.diffusion.schedules import alpha_bar_of, betas
from fastdiff.errors import ConfigError
from fastdiff.files import file_digest
from fastdiff.models.adapter_files.native_names import named_network
from fastdiff.models.adapter_files.start import start_from_file, with_values_of_file
from fastdiff.models.build import Model, build_deferred, build_model, load_model
from fastdiff.models.family import family_of
from fastdiff.models.frozen_base import adapted_without_base, fill, on_meta
from fastdiff.models.kernel_choice import DTYPES
from fastdiff.models.lora import add_lora
from fastdiff.models.pipeline_files import readable, tensors_of
from fastdiff.models.pretrained.pickles import load_published
from fastdiff.models.pretrained.pipeline import Pretrained
from fastdiff.models.pretrained.training_state import read_published_training
from fastdiff.models.pretrained.transport import check_transport


def pretrained(config: PretrainedConfig) -> Pretrained:
    """Return the pipeline of a run."""
    return Pretrained(config.path, config.revision, config.variant, max_tokens=config.max_tokens)


def resolve(config: RunConfig) -> RunConfig:
    """Fill in the network's shape and the prediction from the pretrained pipeline, and a LoRA's layers from its file.

    A branch of a pipeline on the hub is replaced by its current commit, so that the run, its resumes and its export use
    the same weights. ConfigError: unknown pipeline, or its noise schedule differs from that of the run; or the
    file of a LoRA is of another network.
    """
    by_file = not config.pretrained.path or config.pretrained.is_file
    return _with_adapter_file(_explicit(config) if by_file else _of_pipeline(config))


def _of_pipeline(config: RunConfig) -> RunConfig:
    found = pretrained(config.pretrained)
    if found.commit is not None:
        config = replace(config, pretrained=replace(config.pretrained, revision=found.commit))
    if config.pretrained.weights:
        config = replace(config, model=_described(config))
    if config.timesteps.shift == "pipeline":
        config = replace(config, timesteps=replace(config.timesteps, shift=_shift(found.scheduler_config())))
    objective = config.objective
    if not isinstance(objective, DdpmConfig):
        return _explicit(config)
    if config.pretrained.weights or objective.prediction == "auto":
        scheduler = found.scheduler_config()
        if objective.prediction == "auto":
            objective = replace(objective, prediction=_predicted(scheduler))
        _check_schedule(config.pretrained.path, objective, scheduler)
    return replace(config, objective=objective)


def with_local_shape(config: RunConfig) -> RunConfig:
    """Return the run with the shape of its pretrained network, if that is a folder here, and the layers of its LoRA.

    ConfigError: there is no such network, or the file of the LoRA is of another one.
    """
    here = config.pretrained.weights and Path(config.pretrained.path).is_dir()
    if here:
        config = replace(config, model=_described(config))
    return _with_adapter_file(config) if here or config.pretrained.is_file else config


def _with_adapter_file(config: RunConfig) -> RunConfig:
    return replace(config, lora=with_values_of_file(config.lora, config.model))


def _described(config: RunConfig) -> ModelConfig:
    """Return the network of the run's pipeline, with what its file does not describe as the run gives it."""
    return pretrained(config.pretrained).network_config().completed(config.model)


def absolute_path(config: PretrainedConfig) -> str | None:
    """Return the absolute path of a pretrained pipeline or file of this machine; None for one of the hub, or none."""
    path = Path(config.path)
    return str(path.absolute()) if config.path and path.exists() else None


def _explicit(config: RunConfig) -> RunConfig:
    """Replace ``auto`` by the prediction of the process, so that the record names it."""
    prediction: Any = config.objective.predicted
    return replace(config, objective=replace(config.objective, prediction=prediction))


def download(config: PretrainedConfig, *, online: bool) -> None:
    """Download the weights that every rank reads, unless they are on this machine.

    Args:
        config: pipeline of a run.
        online: whether the ranks encode images, and read its encoders.

    Raises:
        ConfigError: a part of the pipeline of the run is missing or cannot be reached.
    """
    if not config.path or config.is_file:
        return
    found = pretrained(config)
    parts = [found.denoiser] if config.weights else []
    if online:
        parts += ["vae", *found.text_parts]
    for part in parts:
        found.weight_files(part)


def base_digest(config: PretrainedConfig, lora: LoraConfig) -> str | None:
    """Return the digest of a LoRA's frozen base weights; None: all are trained. ConfigError: they cannot be read."""
    if not lora.rank:
        return None
    if not config.is_file:
        found = pretrained(config)
        return found.digest(found.denoiser)
    with readable(path := Path(config.path)):
        return file_digest(path)


def adapter_digest(lora: LoraConfig) -> str | None:
    """Return the digest of the file that a LoRA starts from; None: there is none, or it is not here any more."""
    with suppress(OSError):
        return file_digest(Path(lora.init)) if lora.init else None
    return None


def check_base(config: PretrainedConfig, lora: LoraConfig, recorded: str | None) -> None:
    """Refuse base weights that differ from those in the training of the adapter.

    Args:
        config: base of a run.
        lora: adapter of the run.
        recorded: digest of the base weights in the checkpoint.

    Raises:
        ConfigError: they differ, or cannot be read.
    """
    if recorded is not None and (here := base_digest(config, lora)) != recorded:
        raise ConfigError(
            f"{config.path} has changed: its weights have the digest {str(here)[:12]}, the adapter was "
            f"trained on {recorded[:12]}; restore those weights"
        )


def build_network(
    config: RunConfig, weights: Mapping[str, Tensor] | None = None, *, frozen: torch.dtype = torch.float32
) -> Model:
    """Build the network of a run in fp32 on the CPU.

    Args:
        config: resolved configuration of the run.
        weights: all trained parameters, with LoRA the added ones; None: initial or pretrained weights.
        frozen: dtype of the weights that an adapter leaves frozen.

    Raises:
        ConfigError: the weights, or the pretrained weights, belong to another network.
    """
    performance = config.performance
    options = {"recompute": performance.recompute, "attention": performance.attention, "seed": config.seed}
    lora = config.lora.rank > 0
    with _of_this_network():
        if weights is not None and not lora:
            return load_model(config.model, {**untrained(config), **weights}, **options)  # type: ignore[arg-type]
        if lora and config.pretrained.weights:
            model = _adapted(config, weights, fresh=weights is None)
            fill(model, config, _published(config)[1], frozen)
            return model
        if config.pretrained.weights:
            model = load_model(config.model, _pretrained_weights(config), **options)  # type: ignore[arg-type]
        else:
            model = build_model(config.model, **options)  # type: ignore[arg-type]
        if lora:
            add_lora(model, config.lora, seed=config.seed, weights=weights)
    return model


def _adapted(config: RunConfig, weights: Mapping[str, Tensor] | None = None, *, fresh: bool) -> Model:
    """Build the network of a LoRA without its frozen weights; ``fresh``: with the first values of the adapter."""
    model = adapted_without_base(config, untrained(config), weights)
    if fresh and config.lora.init:
        start_from_file(model, config.lora, named_network(config.model))
    return model


def build_on_meta(
    config: RunConfig, shapes: Mapping[str, Sequence[int]] | None = None
) -> tuple[Model, Iterator[tuple[str, Tensor]]]:
    """Build the network of a run without memory for it, and an iterator over its weights.

    Args:
        config: resolved configuration of the run, with LoRA only on pretrained weights that are not quantised.
        shapes: of all trained parameters, which the caller will fill in; None: initial or pretrained weights.

    Returns:
        The network of ``build_network`` on the device ``meta``, and its parameters and buffers by name, fp32 on the
        CPU; with ``shapes`` only what is not trained.

    Raises:
        ConfigError: the shapes, or the pretrained weights, belong to another network.
    """
    if config.lora.rank:
        with _of_this_network():
            model = _adapted(config, fresh=shapes is None)
        frozen = DTYPES[config.performance.precision]
        return model, _checked(on_meta(model, config, _published(config)[1], frozen))
    performance = config.performance
    deferred = build_deferred(
        config.model, recompute=performance.recompute, attention=performance.attention, seed=config.seed
    )
    if shapes is None and not config.pretrained.weights:
        return deferred.network, deferred.weights()
    values: Iterator[tuple[str, Tensor]] = iter(())
    if shapes is not None:
        found = {name: torch.empty(*shape, device="meta") for name, shape in shapes.items()}
    else:
        found, values = _published(config)
    kept = {name: value for name, value in untrained(config).items() if name not in found}
    with _of_this_network():
        # On meta it compares names and shapes, and copies nothing.
        deferred.network.load_state_dict({name: value.to("meta") for name, value in {**found, **kept}.items()})
    return deferred.network, chain(values, kept.items())


@contextmanager
def _of_this_network() -> Iterator[None]:
    """Turn torch's list of differing weights into one message."""
    try:
        yield
    except RuntimeError as error:
        # torch lists every weight, one per line, under a heading.
        first, *others = [line.strip() for line in str(error).splitlines()][1:] or [str(error)]
        more = f" (and {len(others)} more)" if others else ""
        raise ConfigError(f"the weights belong to another network: {first.rstrip('.')}{more}") from None


def _checked(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights; ConfigError: they belong to another network."""
    with _of_this_network():
        yield from weights


def null_label(network: ModelConfig) -> Tensor:
    """Return the label of the null class, ``[]`` int64."""
    return torch.tensor(network.classes)


def untrained(config: RunConfig) -> dict[str, Tensor]:
    """Return the buffers and the unused parameters of a network: those of its pretrained pipeline, or of a new one."""
    family = family_of(config.model)
    kept = {**family.buffers(config.model), **family.unused(config.model)}
    if not kept or not config.pretrained.weights or config.pretrained.is_file:
        return kept
    pipeline = pretrained(config.pretrained)
    return {**kept, **pipeline.tensors_named(pipeline.denoiser, tuple(kept))}


def _published(config: RunConfig) -> tuple[dict[str, Tensor], Iterator[tuple[str, Tensor]]]:
    """Return the pretrained parameters of a run on ``meta``, and themselves, read one after another."""
    if config.pretrained.path.endswith(".safetensors"):
        return _parts_of_file(config.model, config.pretrained)
    if config.pretrained.is_file:
        found = dict(_pretrained_weights(config))
        return found, iter(found.items())
    pipeline = pretrained(config.pretrained)
    part, fixed = pipeline.denoiser, _fixed(config.model)
    shapes = {name: value for name, value in pipeline.tensors(part, on_meta=True) if name not in fixed}
    return shapes, ((name, value) for name, value in pipeline.tensors(part) if name not in fixed)


def _pretrained_weights(config: RunConfig) -> Mapping[str, Tensor]:
    if not config.pretrained.is_file:
        pipeline = pretrained(config.pretrained)
        return pipeline.weights(pipeline.denoiser)
    path, family = _weight_file(config.pretrained), family_of(config.model)
    with readable(path):
        if config.pretrained.training:
            found = read_published_training(path).weights
        else:
            found = load_file(path) if path.suffix == ".safetensors" else load_published(path)
        family.check_published(path, found.keys(), found)
        if path.suffix == ".pt":
            check_transport(path, config.objective)
    fixed = _fixed(config.model)
    return {name: value.float() for name, value in found.items() if name not in fixed}


def _fixed(network: ModelConfig) -> frozenset[str]:
    """Return the names of tensors of published files that the configuration determines."""
    family = family_of(network)
    return family.tables(network).union(family.buffers(network))


def _parts_of_file(
    network: ModelConfig, pretrained: PretrainedConfig
) -> tuple[dict[str, Tensor], Iterator[tuple[str, Tensor]]]:
    """Return the parameters of a safetensors file on ``meta``, and themselves, read one after another."""
    path, family = _weight_file(pretrained), family_of(network)
    fixed = _fixed(network)
    with readable(path), safe_open(path, framework="pt") as file:
        names = set(file.keys())
        tables = {name: file.get_tensor(name) for name in fixed & names}
    family.check_published(path, names, tables)
    found = {name: value for name, value in tensors_of(path, on_meta=True) if name not in fixed}
    return found, ((name, value) for name, value in tensors_of(path) if name not in fixed)


def _weight_file(config: PretrainedConfig) -> Path:
    path = Path(config.path)
    if not path.is_file():
        raise ConfigError(f"--pretrained.path {path}: no such file")
    return path


def _predicted(scheduler: Mapping[str, object]) -> DdpmPrediction:
    """Return the prediction of a pipeline with discrete steps."""
    given = scheduler.get("prediction_type", "epsilon")
    known = {PREDICTION_TYPES[ours]: ours for ours in get_args(DdpmPrediction) if ours in PREDICTION_TYPES}
    if given not in known:
        raise ConfigError(
            f"scheduler_config.json has prediction_type {given!r}, expected {', '.join(known)}; or set "
            "--objective.prediction epsilon, v or x0"
        )
    return cast(DdpmPrediction, known[str(given)])


def _shift(scheduler: Mapping[str, object]) -> float:
    """Return the time shift of a pipeline for pictures of any size; 1 if it depends on the size."""
    return 1.0 if scheduler.get("use_dynamic_shifting") else float(cast(float, scheduler.get("shift", 1.0)))


def _check_schedule(pipeline: str, objective: DdpmConfig, scheduler: Mapping[str, object]) -> None:
    """Refuse to fine-tune with another noise schedule than that of the pretraining."""
    theirs, ours = alpha_bar_of(scheduler), torch.cumprod(1.0 - betas(objective), 0)
    if theirs.shape != ours.shape or not torch.allclose(theirs, ours, rtol=1e-4, atol=1e-7):
        raise ConfigError(
            f"the scheduler of {pipeline} has beta_schedule {scheduler.get('beta_schedule')} from "
            f"{scheduler.get('beta_start')} to {scheduler.get('beta_end')}, rescale_betas_zero_snr "
            f"{scheduler.get('rescale_betas_zero_snr', False)}, which differs from --objective.schedule "
            f"{objective.schedule} --objective.zero_terminal_snr {objective.zero_terminal_snr}; "
            "use those of its training"
        )
