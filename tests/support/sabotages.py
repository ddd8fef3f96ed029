"""Errors of a training that raise nothing, one per cause that ``fastdiff conform`` knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.config.run import RunConfig
from fastdiff.data.loading.batches import Normaliser
from fastdiff.diffusion.levels import Corruption
from fastdiff.diffusion.objective import Objective
from fastdiff.parallel.world import World
from fastdiff.rng import Stream, uniform
from fastdiff.training import build
from fastdiff.training.callbacks.statistics import Statistics
from fastdiff.training.ema import Ema
from fastdiff.training.loop import train
from tests.support.runs import launch


class Enough(Exception):
    """The end of a run before its last step."""


def run_until(config: RunConfig, world: World, last: int) -> None:
    """Train until after step ``last``, on the schedule of the whole run."""
    on_step = Statistics.on_step

    def then_end(self: Statistics, state: Any) -> None:
        on_step(self, state)
        if state.progress.steps >= last:
            raise Enough

    with patch.object(Statistics, "on_step", then_end):
        with suppress(Enough):
            train(config, launch(0), world)


def _latents(change: Callable[[Tensor, Batch], Tensor]) -> AbstractContextManager[Any]:
    """Change the latents of every batch."""
    normalised = Normaliser.__call__

    def changed(self: Normaliser, stored: Any) -> Batch:
        batch = normalised(self, stored)
        return replace(batch, latents=change(batch.latents, batch).contiguous())

    return patch.object(Normaliser, "__call__", changed)


def _blurred(latents: Tensor, batch: Batch) -> Tensor:
    """Latents of the same mean and spread, in which neighbours are more alike."""
    wide = torch.nn.functional.pad(latents, (1, 1, 1, 1), mode="replicate")
    soft = 0.5 * latents + 0.25 * (wide[..., 1:-1, :-2] + wide[..., 1:-1, 2:])
    return (soft - soft.mean()) * (latents.std() / soft.std()) + latents.mean()


def _mirrored(latents: Tensor, batch: Batch) -> Tensor:
    """Half of the samples, mirrored once more than the recipe does."""
    again = uniform(123, Stream.FLIP, batch.position, 1)[:, 0] < 0.5
    return torch.where(again.view(-1, 1, 1, 1), latents.flip(3), latents)


def _time(change: Callable[[Tensor], Tensor]) -> AbstractContextManager[Any]:
    time = Corruption.time.fget  # type: ignore[attr-defined]
    return patch.object(Corruption, "time", property(lambda self: change(time(self))))


def _objective(**changes: Any) -> AbstractContextManager[Any]:
    """Train another objective than the configuration and the log say."""

    def other(config: Any, **options: Any) -> Objective:
        return Objective(replace(config, **changes), **options)

    return patch.object(build, "Objective", other)


def _condition(change: Callable[[Objective, Batch], dict[str, Tensor]]) -> AbstractContextManager[Any]:
    return patch.object(Objective, "_drop", change)


def _not_dropped(self: Objective, batch: Batch) -> dict[str, Tensor]:
    return {name: value for name, value in batch.condition.items() if self.inputs is None or name in self.inputs}


@contextmanager
def _empty_averages() -> Iterator[None]:
    """Averages as of parameters that ZeRO-3 has taken away: nothing is ever added to them."""
    made = Ema.__init__

    def emptied(self: Ema, *given: Any, **options: Any) -> None:
        made(self, *given, **options)
        for tensors in self.averages.values():
            for tensor in tensors:
                if tensor is not None:
                    tensor.zero_()

    with patch.object(Ema, "__init__", emptied), patch.object(Ema, "update", lambda self, applied: None):
        yield


def _learning_rate(factor: float) -> AbstractContextManager[Any]:
    """Multiply the learning rate, as a script does that scales it by the number of ranks a second time."""
    built = build.build_engine

    def other(config: RunConfig, *rest: Any) -> Any:
        return built(replace(config, optim=replace(config.optim, lr=factor * config.optim.lr)), *rest)

    return patch.object(build, "build_engine", other)


def without_masks() -> AbstractContextManager[Any]:
    """Let the network attend to the padding of captions."""
    dropped = Objective._drop

    def seen(self: Objective, batch: Batch) -> dict[str, Tensor]:
        found = dropped(self, batch)
        return {name: torch.ones_like(value) if value.dtype == torch.bool else value for name, value in found.items()}

    return _condition(seen)


SABOTAGES: Mapping[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
    "latents_half_as_large": ("latent_scale", lambda: _latents(lambda latents, _: 0.5 * latents)),
    "latents_shifted": ("latent_shift", lambda: _latents(lambda latents, _: latents + 0.3)),
    "time_reversed": ("time", lambda: _time(lambda time: 999 - time)),
    "time_in_unit_interval": ("time", lambda: _time(lambda time: time / 1000)),
    "no_dropout": ("condition_dropout", lambda: _condition(_not_dropped)),
    "blurred_latents": ("autoencoder", lambda: _latents(_blurred)),
    "empty_averages": ("averages", _empty_averages),
    "min_snr_weights": ("weighting", lambda: _objective(weighting="min_snr")),
    "mirrored_twice": ("flip", lambda: _latents(_mirrored)),
    "epsilon_for_v": ("prediction", lambda: _objective(prediction="epsilon")),
    "learning_rate_times_4": ("learning_rate", lambda: _learning_rate(4.0)),
}
"""By name: the cause as ``fastdiff conform`` names it, and what injects it."""


def inject(name: str, stack: ExitStack) -> str:
    """Enter a sabotage; return its cause."""
    cause, enter = SABOTAGES[name]
    stack.enter_context(enter())
    return cause
