"""Published training state: weights, averages and the state of AdamW.

openai/improved-diffusion and openai/guided-diffusion write ``model000100.pt``, ``ema_0.9999_000100.pt`` and
``opt000100.pt`` to one folder; facebookresearch/DiT writes one file ``0000100.pt`` with ``model``, ``ema``, ``opt`` and
``args``.
"""

import re
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastdiff.errors import ConfigError
from fastdiff.models.pipeline_files import readable
from fastdiff.models.pretrained.pickles import check_size, read_published, state_dict
from fastdiff.models.pretrained.repa import refuse_repa

DIT_EMA_RATE = 0.9999
"""Decay rate of DiT's train.py; its files do not contain it."""
_IDDPM = re.compile(r"model(\d{6,})\.pt")
_DIT = re.compile(r"(\d{7,})\.pt")
_EXPECTED = "expected modelNNNNNN.pt of improved-diffusion or guided-diffusion, or NNNNNNN.pt of DiT"
_INSTEAD = "give the files of one training, or start from the weights alone, without --pretrained.training"
_UNNAMED = 100
"""Maximum number of AdamW steps beyond the step in the name of a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamState:
    """State of AdamW by parameter name; a parameter that was never trained has none."""

    applied: int
    """Number of steps."""
    exp_avg: dict[str, Tensor]
    """First moments, fp32, with the shapes of the parameters."""
    exp_avg_sq: dict[str, Tensor]
    """Second moments."""
    lr: float
    """Learning rate of the next step."""
    betas: tuple[float, float]
    eps: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedTraining:
    """Contents of the files of a training, on the CPU."""

    step: int
    """Number of steps: the number in the file name, or AdamW's own count if it is larger.

    improved-diffusion counts from 0 in names: its file numbered 100 has taken 101 steps, and each of its resumed runs
    repeats the step of the name.
    """
    weights: dict[str, Tensor]
    """State dict of the network; a DiT's includes ``pos_embed``."""
    averages: dict[float, dict[str, Tensor]] = field(default_factory=dict)
    """State dicts by decay rate."""
    optimizer: AdamState | None = None
    """State of AdamW; None: not saved."""


def read_published_training(path: Path) -> PublishedTraining:
    """Read a training of improved-diffusion, guided-diffusion or DiT without running code in its files.

    Args:
        path: ``modelNNNNNN.pt``, with averages and optimizer in the same folder, or ``NNNNNNN.pt``.

    Raises:
        ConfigError: a file is missing, of another kind or step, or hostile.
    """
    if path.is_file():
        if found := _IDDPM.fullmatch(path.name):
            return _read_iddpm(path, found[1])
        if found := _DIT.fullmatch(path.name):
            return _read_dit(path, int(found[1]))
    raise ConfigError(f"{path}: {_EXPECTED}")


def _read_iddpm(file: Path, digits: str) -> PublishedTraining:
    _require_same_step(file, digits)
    weights = _weights(file)
    averages = {}
    for path in sorted(file.parent.glob(f"ema_*_{digits}.pt")):
        rate = path.name.removeprefix("ema_").removesuffix(f"_{digits}.pt")
        with readable(path):
            averages[float(rate)] = _like(weights, _weights(path), path)
    optimizer, path = None, file.with_name(f"opt{digits}.pt")
    if path.exists():
        with readable(path):
            optimizer = _adam(read_published(path), weights, path)
    step = _step(int(digits), optimizer, file)
    return PublishedTraining(step=step, weights=weights, averages=averages, optimizer=optimizer)


def _require_same_step(file: Path, digits: str) -> None:
    """Refuse a folder with averages or AdamW states of other steps only, which would count as not saved."""
    for pattern, own in (("ema_*_[0-9]*.pt", f"_{digits}.pt"), ("opt[0-9]*.pt", f"opt{digits}.pt")):
        names = sorted(path.name for path in file.parent.glob(pattern))
        if names and not any(name.endswith(own) for name in names):
            raise ConfigError(f"{file}: its folder has {names[-1]}, but no such file of the same step; {_INSTEAD}")


def _step(named: int, optimizer: AdamState | None, file: Path) -> int:
    """Return the step of the training; see ``PublishedTraining.step``."""
    applied = optimizer.applied if optimizer is not None else 0
    if applied > named + _UNNAMED:
        raise ConfigError(f"{file}: its name has step {named}, but its AdamW has taken {applied} steps; {_INSTEAD}")
    return max(named, applied)


def _weights(path: Path) -> dict[str, Tensor]:
    with readable(path):
        found = state_dict(read_published(path), "expected a state dict")
        check_size(found.values(), path)
    return found


def _read_dit(file: Path, step: int) -> PublishedTraining:
    with readable(file):
        content = read_published(file)
        weights = state_dict(content.get("model"), "expected a state dict under 'model'")
        refuse_repa(file, weights)
        averages = {}
        if "ema" in content:
            average = state_dict(content["ema"], "expected a state dict under 'ema'")
            averages[DIT_EMA_RATE] = _like(weights, average, file)
        check_size(chain(weights.values(), *(average.values() for average in averages.values())), file)
        optimizer = _adam(content["opt"], weights, file) if "opt" in content else None
    step = _step(step, optimizer, file)
    return PublishedTraining(step=step, weights=weights, averages=averages, optimizer=optimizer)


def _like(weights: dict[str, Tensor], average: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    if {name: value.shape for name, value in average.items()} != {name: value.shape for name, value in weights.items()}:
        raise ConfigError(f"{path}: the average belongs to other weights; {_INSTEAD}")
    return average


def _adam(state: Any, weights: dict[str, Tensor], path: Path) -> AdamState | None:
    """Read the state dict of ``torch.optim.AdamW``; None if it has taken no step."""
    try:
        moments = {
            key: {i: each[key].detach() for i, each in state["state"].items()} for key in ("exp_avg", "exp_avg_sq")
        }
        steps = {int(each["step"]) for each in state["state"].values()}  # before PyTorch 1.12 a number, now a tensor
        numbers = [i for group in state["param_groups"] for i in group["params"]]
        strange = moments["exp_avg"].keys() - set(numbers)
        options = _options(state["param_groups"][0])
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError, OverflowError, ValueError):
        raise ConfigError(f"{path}: its optimizer is not an AdamW; {_INSTEAD}") from None
    check_size(chain(*(values.values() for values in moments.values())), path)
    if strange:
        raise ConfigError(f"{path}: its optimizer has the state of unknown parameters; {_INSTEAD}")
    if not steps:
        return None
    if len(steps) > 1:
        raise ConfigError(f"{path}: its AdamW has taken {sorted(steps)} steps, expected one number; {_INSTEAD}")
    if min(steps) < 0:
        raise ConfigError(f"{path}: its AdamW has taken {min(steps)} steps, expected 0 or more; {_INSTEAD}")
    places = _places(numbers, weights)
    if places is None:
        raise ConfigError(
            f"{path}: its optimizer belongs to other weights: it has {len(numbers)} parameters, expected "
            f"{len(weights)}, or for fp16 training 1 (improved-diffusion) or 2 (guided-diffusion); {_INSTEAD}"
        )
    exp_avg, exp_avg_sq = (_by_name(moments[key], places, weights, path) for key in ("exp_avg", "exp_avg_sq"))
    return AdamState(applied=steps.pop(), exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, **options)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group for ``AdamState``; the first group stands for all."""
    numbers = {name: float(group[name]) for name in ("lr", "eps", "weight_decay")}
    return {"betas": (float(group["betas"][0]), float(group["betas"][1])), **numbers}


def _places(numbers: list[int], weights: dict[str, Tensor]) -> dict[int, list[str]] | None:
    """Return the names of the weights in each optimizer parameter, in order; None if the number does not fit.

    In fp16 training, improved-diffusion has one parameter of all weights; guided-diffusion has a first one of all
    vectors and a second one of all other weights.
    """
    if len(numbers) == len(weights):
        parts = [[name] for name in weights]
    elif len(numbers) == 1:
        parts = [list(weights)]
    elif len(numbers) == 2:
        parts = [[name for name in weights if (weights[name].dim() > 1) == matrices] for matrices in (False, True)]
    else:
        return None
    return dict(zip(numbers, parts, strict=True))


def _by_name(
    moments: dict[int, Tensor], places: dict[int, list[str]], weights: dict[str, Tensor], path: Path
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for number, moment in moments.items():
        names = places[number]
        sizes = [weights[name].numel() for name in names]
        if moment.numel() != sum(sizes) or (len(names) == 1 and moment.shape != weights[names[0]].shape):
            shape = tuple(weights[names[0]].shape) if len(names) == 1 else f"({sum(sizes)},)"
            raise ConfigError(
                f"{path}: its optimizer belongs to other weights: parameter {number} has the shape "
                f"{tuple(moment.shape)}, expected {shape}; {_INSTEAD}"
            )
        for name, part in zip(names, torch.split(moment.flatten(), sizes), strict=True):
            found[name] = part.view(weights[name].shape)
    return found
