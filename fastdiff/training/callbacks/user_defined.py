"""Callbacks of users: what they see of a run, and when they are called."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastdiff.config.run import RunConfig
from fastdiff.console import log
from fastdiff.errors import FastdiffError, PluginError, require
from fastdiff.plugins.user_code import Plugin, load
from fastdiff.progress import Every
from fastdiff.sanitize import escape
from fastdiff.training.callbacks.base import Callback
from fastdiff.training.state import TrainState
from fastdiff.training.trackers.build import Trackers

_FLAG = "--output.callbacks"
HOOKS = ("on_step", "on_end", "on_preempted")
"""Methods of a user's callback; each takes a ``RunView``, and all but one may be missing."""


@dataclass(frozen=True, slots=True)
class RunView:
    """A run as a user's callback sees it, at one of its steps."""

    _state: TrainState
    _trackers: Trackers

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self._state.progress.steps

    @property
    def samples(self) -> int:
        """Samples seen by all ranks together."""
        return self._state.progress.samples

    @property
    def config(self) -> RunConfig:
        """Configuration of the run."""
        return self._state.config

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._state.folder

    @property
    def rank(self) -> int:
        """Number of this process; the callback is called on every rank."""
        return self._state.world.rank

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self._state.world.size

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self._state.world.device

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last step."""
        return self._state.engine.lr

    @property
    def grad_norm(self) -> torch.Tensor | float | None:
        """Gradient norm of the last step before clipping, on the device; None: not measured."""
        return self._state.engine.grad_norm()

    @property
    def network(self) -> nn.Module:
        """The network with the weights of this step; under ZeRO-3 they are spread over the ranks."""
        return self._state.engine.module

    def log(self, numbers: Mapping[str, float]) -> None:
        """Show numbers in the trackers and add them to ``callbacks.jsonl``; on ranks other than 0 nothing happens.

        A number named ``step`` is left out: every line has the step of the run.
        """
        given = {name: float(value) for name, value in numbers.items() if name != "step"}
        self._trackers.scalars(given, self.step)
        if self._state.world.is_first:
            self._state.lines[LINES].write({"step": self.step, **given})


LINES = "callbacks.jsonl"
"""File of the run folder with the numbers that users' callbacks log."""


class UserCallback(Callback):
    """A callback of a user, a class without arguments, with methods of ``HOOKS``, called ``every`` so many steps.

    ConfigError: it has none of the methods, ``every`` is no number of steps, or its code raises an exception.
    """

    def __init__(self, plugin: Plugin, state: TrainState, trackers: Trackers) -> None:
        self._plugin, self._what = plugin, f"{_FLAG} {plugin.text}"
        self._view = RunView(state, trackers)
        with plugin.blamed(self._what):
            self._own = plugin.found()
        hooks = [name for name in HOOKS if callable(getattr(self._own, name, None))]
        require(bool(hooks), f"{self._what}: expected at least one of the methods {', '.join(HOOKS)}")
        every = getattr(self._own, "every", state.config.output.log_every)
        require(
            type(every) is int and every >= 1,
            f"{self._what}: its every is {every!r}, expected a number of steps, 1 or above",
        )
        self._every = Every(every)

    @property
    def every(self) -> int:
        """Steps between two calls."""
        return self._every.steps

    def on_step(self, state: TrainState) -> None:
        """Call the user's method when due, on all ranks together; PluginError on all: it fails on one."""
        if self._every.due(state.progress):
            state.world.on_all_ranks(lambda: self._call("on_step"))

    def on_end(self, state: TrainState) -> None:
        """Call the user's method; the run is complete, so an error is only shown."""
        self._call_at_end("on_end")

    def on_preempted(self, state: TrainState) -> None:
        """Call the user's method; the run is saved, so an error is only shown."""
        self._call_at_end("on_preempted")

    def _call_at_end(self, name: str) -> None:
        try:
            self._call(name)
        except FastdiffError as error:
            log.warning("%s", escape(str(error)))

    def _call(self, name: str) -> None:
        hook: Any = getattr(self._own, name, None)
        if hook is not None:
            # A callback that draws from torch's generator must not change the run.
            with self._plugin.blamed(f"{self._what}: {name}", PluginError), torch.random.fork_rng(devices=[]):
                hook(self._view)


def open_callbacks(state: TrainState, trackers: Trackers) -> list[Callback]:
    """Return the callbacks of ``--output.callbacks``, on all ranks together; ConfigError on all: one fails."""
    named = state.config.output.callbacks
    if named:
        state.json_lines(LINES)

    def opened() -> list[UserCallback]:
        plugins = [load(text, "fastdiff.callbacks", _FLAG) for text in named]
        return [UserCallback(plugin, state, trackers) for plugin in plugins]

    callbacks = state.world.on_all_ranks(opened)
    every = [callback.every for callback in callbacks]
    require(
        all(other == every for other in state.world.gather(every)),
        f"{_FLAG}: the ranks have callbacks with another every; it must be the same on all ranks",
    )
    return list(callbacks)
