"""The network of a run: from its seed, from pretrained weights, or from a checkpoint; with LoRA, if it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fastdiff.config import Prediction, RunConfig
from fastdiff.errors import ConfigError
from fastdiff.model_config import DiTConfig
from fastdiff.models import Model, build_model, load_model
from fastdiff.pretrained import Pretrained
from fastdiff.schedule import alpha_bar_of, betas

_PREDICTIONS: dict[str, Prediction] = {"epsilon": "epsilon", "v_prediction": "v", "sample": "x0"}


def pretrained(config: RunConfig) -> Pretrained:
    """The pipeline that the run names."""
    return Pretrained(config.pretrained.path, config.pretrained.revision, config.pretrained.variant)


def resolve(config: RunConfig) -> RunConfig:
    """Fill in what the pretrained pipeline decides: the shape of its network, and what it predicts.

    Raises:
        ConfigError: there is no such pipeline, or its noise schedule is not that of the run.
    """
    if not config.pretrained.path or _is_file(config):
        return config
    found = pretrained(config)
    if config.pretrained.weights:
        config = replace(config, model=found.unet_config())
    if config.pretrained.weights or config.objective.prediction == "auto":
        scheduler = found.scheduler_config()
        if config.objective.prediction == "auto":
            predicted = _PREDICTIONS[str(scheduler.get("prediction_type", "epsilon"))]
            config = replace(config, objective=replace(config.objective, prediction=predicted))
        _check_schedule(config, scheduler)
    return config


def build_network(config: RunConfig, weights: Mapping[str, Tensor] | None = None) -> Model:
    """Build the network of a run whose configuration is resolved, in fp32 on the CPU.

    Args:
        config: the run.
        weights: its trained parameters, all of them or, with LoRA, the added ones; None: at the start of the run.

    Raises:
        ConfigError: the weights, or the pretrained ones, are those of another network.
    """
    options = {"recompute": config.performance.recompute, "attention": config.performance.attention}
    lora = config.lora.rank > 0
    try:
        if weights is not None and not lora:
            return load_model(config.model, weights, **options)  # type: ignore[arg-type]
        if config.pretrained.weights:
            model = load_model(config.model, _pretrained_weights(config), **options)  # type: ignore[arg-type]
        else:
            model = build_model(config.model, seed=config.seed, **options)  # type: ignore[arg-type]
        if lora:
            from fastdiff.models.lora import add_lora  # needs peft, which is optional

            add_lora(model, config.lora, seed=config.seed, weights=weights)
    except RuntimeError as error:
        raise ConfigError(f"the weights are those of another network: {error}") from None
    return model


def null_label(config: RunConfig) -> Tensor:
    """``[]`` int64: the class of a DiT that stands for no class."""
    assert isinstance(config.model, DiTConfig)
    return torch.tensor(config.model.classes)


def _is_file(config: RunConfig) -> bool:
    return Path(config.pretrained.path).suffix in (".safetensors", ".pt")


def _pretrained_weights(config: RunConfig) -> Mapping[str, Tensor]:
    if not _is_file(config):
        return pretrained(config).unet_weights()
    from safetensors.torch import load_file

    path = Path(config.pretrained.path)
    if not path.is_file():
        raise ConfigError(f"--pretrained.path {path}: no such file")
    found = load_file(path) if path.suffix == ".safetensors" else _published(path)
    return {name: value.float() for name, value in found.items() if name != "pos_embed"}


def _published(path: Path) -> dict[str, Tensor]:
    """Weights of a DiT as published: a plain state dict, or one under ``ema``. No code in the file is run."""
    import argparse

    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(path, map_location="cpu", weights_only=True)
    return dict(content.get("ema", content))


def _check_schedule(config: RunConfig, scheduler: Mapping[str, object]) -> None:
    """Refuse to fine-tune under another noise than the weights were trained with."""
    theirs, ours = alpha_bar_of(scheduler), torch.cumprod(1.0 - betas(config.objective), 0)
    if theirs.shape != ours.shape or not torch.allclose(theirs, ours, rtol=1e-4, atol=1e-7):
        raise ConfigError(
            f"the scheduler of {config.pretrained.path} has beta_schedule {scheduler.get('beta_schedule')} from "
            f"{scheduler.get('beta_start')} to {scheduler.get('beta_end')}, rescale_betas_zero_snr "
            f"{scheduler.get('rescale_betas_zero_snr', False)}: not the noise of --objective.schedule "
            f"{config.objective.schedule} --objective.zero_terminal_snr {config.objective.zero_terminal_snr}; "
            "use the ones that it was trained with"
        )
