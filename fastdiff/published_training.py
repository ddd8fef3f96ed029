"""A whole training as published: weights, averages and the state of AdamW.

openai/improved-diffusion writes ``model000100.pt``, ``ema_0.9999_000100.pt`` and ``opt000100.pt`` beside each other,
facebookresearch/DiT one file ``0000100.pt`` of ``model``, ``ema``, ``opt`` and ``args``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastdiff.errors import ConfigError
from fastdiff.pretrained import readable
from fastdiff.published_weights import check_size, read_published, state_dict

DIT_EMA_RATE = 0.9999
"""That of DiT's train.py, whose files do not say it."""
_IDDPM = re.compile(r"model(\d{6,})\.pt")
_DIT = re.compile(r"(\d{7,})\.pt")
_EXPECTED = "expected modelNNNNNN.pt of improved-diffusion or NNNNNNN.pt of DiT, or a folder with one"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamState:
    """The state of AdamW by name of the parameter; a parameter that was never trained has none."""

    applied: int
    """Steps."""
    exp_avg: dict[str, Tensor]
    """First moments, fp32, of the shapes of the parameters."""
    exp_avg_sq: dict[str, Tensor]
    """Second moments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedTraining:
    """What the files of a training hold, on the CPU."""

    step: int
    """Which the name of the file says."""
    weights: dict[str, Tensor]
    """State dict of the network; that of a DiT has ``pos_embed``."""
    averages: dict[float, dict[str, Tensor]] = field(default_factory=dict)
    """State dicts by decay rate."""
    optimizer: AdamState | None = None
    """None: it was not saved."""


def read_published_training(path: Path) -> PublishedTraining:
    """Read a training of improved-diffusion or DiT, without running what is in its files.

    Args:
        path: ``modelNNNNNN.pt``, whose averages and optimizer lie beside it, or ``NNNNNNN.pt``, or a folder, of which
            the last step is read.

    Raises:
        ConfigError: there is no such file, or one holds something else, or is hostile.
    """
    file = _newest(path) if path.is_dir() else path
    found = _IDDPM.fullmatch(file.name)
    if found:
        return _read_iddpm(file, found[1])
    found = _DIT.fullmatch(file.name)
    if found is None or not file.is_file():
        raise ConfigError(f"{path}: {_EXPECTED}")
    return _read_dit(file, int(found[1]))


def _newest(folder: Path) -> Path:
    steps = {
        path: int(found[1])
        for path in sorted(folder.iterdir())
        if (found := _IDDPM.fullmatch(path.name) or _DIT.fullmatch(path.name))
    }
    if not steps:
        raise ConfigError(f"{folder}: {_EXPECTED}")
    return max(steps, key=steps.__getitem__)


def _read_iddpm(file: Path, digits: str) -> PublishedTraining:
    weights = _weights(file)
    averages = {}
    for path in sorted(file.parent.glob(f"ema_*_{digits}.pt")):
        rate = path.name.removeprefix("ema_").removesuffix(f"_{digits}.pt")
        with readable(path):
            averages[float(rate)] = _like(weights, _weights(path))
    optimizer, path = None, file.with_name(f"opt{digits}.pt")
    if path.exists():
        with readable(path):
            optimizer = _adam(read_published(path), weights, path)
    return PublishedTraining(step=int(digits), weights=weights, averages=averages, optimizer=optimizer)


def _weights(path: Path) -> dict[str, Tensor]:
    with readable(path):
        found = state_dict(read_published(path), "expected a state dict")
        check_size(found.values(), path)
    return found


def _read_dit(file: Path, step: int) -> PublishedTraining:
    with readable(file):
        content = read_published(file)
        weights = state_dict(content.get("model"), "expected a state dict under 'model'")
        averages = {}
        if "ema" in content:
            averages[DIT_EMA_RATE] = _like(weights, state_dict(content["ema"], "expected a state dict under 'ema'"))
        check_size(chain(weights.values(), *(average.values() for average in averages.values())), file)
        optimizer = _adam(content["opt"], weights, file) if "opt" in content else None
    return PublishedTraining(step=step, weights=weights, averages=averages, optimizer=optimizer)


def _like(weights: dict[str, Tensor], average: dict[str, Tensor]) -> dict[str, Tensor]:
    if {name: value.shape for name, value in average.items()} != {name: value.shape for name, value in weights.items()}:
        raise ValueError("the average is one of other weights")
    return average


def _adam(state: Any, weights: dict[str, Tensor], path: Path) -> AdamState | None:
    """The state dict of ``torch.optim.AdamW``, whose parameters are counted in the order of the weights.

    That of a training in 16 bits of improved-diffusion is of one parameter, all weights one after another. None: of no
    step.
    """
    try:
        moments = {key: {i: each[key] for i, each in state["state"].items()} for key in ("exp_avg", "exp_avg_sq")}
        steps = {int(each["step"]) for each in state["state"].values()}  # before PyTorch 1.12 a number, now a tensor
        numbers = [i for group in state["param_groups"] for i in group["params"]]
        check_size(chain(*(values.values() for values in moments.values())), path)
        if not steps:
            return None
        (applied,) = steps
        exp_avg, exp_avg_sq = (_by_name(moments[key], numbers, weights) for key in ("exp_avg", "exp_avg_sq"))
    except (KeyError, TypeError, AttributeError, RuntimeError, OverflowError):
        raise ValueError("its optimizer is not an AdamW") from None
    return AdamState(applied=applied, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)


def _by_name(moments: dict[int, Tensor], numbers: list[int], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    if len(numbers) == 1 < len(weights):
        parts = torch.split(moments[numbers[0]].flatten(), [value.numel() for value in weights.values()])
        return {name: part.view(weights[name].shape) for name, part in zip(weights, parts, strict=True)}
    named = dict(zip(numbers, weights, strict=False))
    found = {named[number]: moment for number, moment in moments.items()}
    same = all(value.shape == weights[name].shape for name, value in found.items())
    if len(numbers) != len(weights) or not same:
        raise ValueError("its optimizer is one of other weights")
    return found
