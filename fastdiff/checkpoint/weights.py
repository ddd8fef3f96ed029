"""Selection of the weights of a checkpoint: raw, a saved average, or one reconstructed from the snapshots."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fastdiff.checkpoint.posthoc_ema import reconstruct
from fastdiff.checkpoint.power_function import constant_name, in_words, power_name
from fastdiff.checkpoint.reader import Checkpoint
from fastdiff.errors import ConfigError
from fastdiff.parallel.fragments import Fragment

AS_TRAINED = "weights as trained"
"""Description of the raw weights."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters of a model, read one at a time."""

    description: str
    """"weights as trained", "EMA of rate 0.9999" or "EMA of width 0.07 (fit error 0.1 %, made from 12 of digest
    2c26b46b68ff)". Together with the checkpoint it identifies the weights."""
    read: Callable[[str], Tensor]
    """Returns a parameter, fp32 on the CPU."""


def select(saved: Checkpoint, *, rate: float | None = None, std: float | None = None, raw: bool = False) -> Weights:
    """Select weights: by default the first EMA, or the raw weights if there is none.

    Args:
        saved: the checkpoint.
        rate: decay rate of a constant average.
        std: relative std of a power-function average: a saved one, or one reconstructed from the snapshots.
        raw: select the raw weights.

    Raises:
        ConfigError: there is no such average.
    """
    if raw:
        return _saved(saved, "master", AS_TRAINED)
    if rate is not None:
        if rate not in saved.ema_rates:
            raise ConfigError(
                f"{saved.folder} has no EMA of rate {rate}; it has {list(saved.ema_rates)} and stds (--ema-std) "
                f"{list(saved.ema_stds)}"
            )
        return _average(saved, constant_name(rate))
    if std is not None:
        if std in saved.ema_stds:
            return _average(saved, power_name(std))
        made = reconstruct(saved, std)
        how = f"fit error {100 * made.error:.2g} %, made from {len(made.terms)} of digest {made.digest[:12]}"
        return Weights(f"{in_words(power_name(std))} ({how})", made.read)
    if saved.ema_rates:
        return select(saved, rate=saved.ema_rates[0])
    return select(saved, std=saved.ema_stds[0]) if saved.ema_stds else select(saved, raw=True)


def _average(saved: Checkpoint, name: str) -> Weights:
    return _saved(saved, f"ema/{name}", in_words(name))


def _saved(saved: Checkpoint, kind: str, description: str) -> Weights:
    shapes = saved.manifest["parameters"]

    def read(name: str) -> Tensor:
        return saved.slice(kind, Fragment(name, 0, math.prod(shapes[name]), 0)).view(shapes[name]).float()

    return Weights(description, read)
