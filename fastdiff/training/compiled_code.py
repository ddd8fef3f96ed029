"""Compiled code of a run on all ranks: taken from an earlier run at the start, kept after the first step."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import as_json, plugins
from fastdiff.console import log
from fastdiff.models import kernel_choice
from fastdiff.models.compile_cache.cache import (
    SUFFIX,
    VARIABLES,
    CompileCache,
    Kept,
    NotWholeError,
    is_inherited,
    open_cache,
)
from fastdiff.models.compile_cache.environment import describe, key_of
from fastdiff.parallel.world import World
from fastdiff.plurals import counted
from fastdiff.training.callbacks.base import Callback
from fastdiff.training.state import TrainState

_SECTIONS = ("model", "lora", "performance")
"""What decides which code a run compiles. Sizes of batches and latents only add to it."""


@contextmanager
def compiled_code(config: RunConfig, world: World, optimizer_device: torch.device) -> Iterator[Callback]:
    """Use the code of an earlier run, if this one compiles any, and yield the callback that keeps it; on all ranks.

    A folder that cannot be used, or that the environment names, is told and costs no more than the time of
    compilation.

    Args:
        config: of the run.
        world: the ranks.
        optimizer_device: device of the optimizer step.
    """
    compiles = kernel_choice.compiles_any(config.optim, config.performance, world.device, optimizer_device)
    if not (world.device.type == "cuda" or compiles):
        yield Callback()
        return
    # Nodes may differ in their environment, and no rank may wait here for one that has gone on.
    if given := next(filter(None, world.gather(_given())), ""):
        if world.is_first:
            log.info(f"compiled code: in {given}, as the environment says; fastdiff keeps no copy")
        yield Callback()
        return
    facts = {**describe(world.device), **_of_run(config)}
    with ExitStack() as stack:
        cache, problem = _open(facts, stack, compiles=compiles)
        key = None if cache is None else key_of(facts)
        others = world.gather((key, problem, None if cache is None else cache.source))
        if world.is_first:
            # Of the ranks of a node, one has unpacked, and the others have found its folder full.
            sources = [source for other, _, source in others if other == key and source is not None]
            source = next((path for path in sources if path.suffix == SUFFIX), next(iter(sources), None))
            _tell(cache, source, list(dict.fromkeys(found for _, found, _ in others if found)))
        is_keeper = [other for other, *_ in others].index(key) == world.rank
        yield Callback() if cache is None else KeepCode(cache, is_keeper=is_keeper, tells=world.is_first)


def _given() -> str:
    """Return the folders that the user names, in words.

    A process that has compiled names folders to those that it starts, too: those of its run, or torch's default.
    """
    named = {name: value for name in VARIABLES if (value := os.environ.get(name)) and not is_inherited(name, value)}
    if not named:
        return ""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # its import takes a second

    default = default_cache_dir()
    return " and ".join(f"{name}={value}" for name, value in named.items() if not Path(value).is_relative_to(default))


def _of_run(config: RunConfig) -> dict[str, Any]:
    recorded = as_json(config)
    # The network of a user by the digest of its file: graphs hold its ops by name, too, and not their gradients.
    own = {"optimizer": config.optim.name, "network": plugins(config).get("plugin.network")}
    return {name: recorded[name] for name in _SECTIONS} | own


def _open(facts: dict[str, Any], stack: ExitStack, *, compiles: bool) -> tuple[CompileCache | None, str | None]:
    """Return the cache and what is wrong with its pack, or with the cache."""
    try:
        cache = stack.enter_context(open_cache(facts, compiles=compiles))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return None, f"{where}{error.strerror or error}"
    return cache, cache.problem


def _tell(cache: CompileCache | None, source: Path | None, problems: list[str]) -> None:
    for problem in problems:
        log.warning(f"compiled code: not taken from an earlier run: {problem}")
    if cache is None:
        return
    if source is None:
        log.info("compiled code: none for this network and machine yet; compiling for the first time")
    else:
        log.info(f"compiled code: {counted(cache.kernels, 'kernel')} from {source}")


class KeepCode(Callback):
    """Writes the pack after the first step, which has compiled everything, and later if there is more.

    It looks again after steps 2, 4, 8, and so on, and at the end: other sizes of images are compiled later, and what
    cannot be written now may be then. It does nothing after an error, when a compiler may still be writing.
    """

    def __init__(self, cache: CompileCache, *, is_keeper: bool, tells: bool) -> None:
        self._cache = cache
        self._is_keeper = is_keeper
        self._tells = tells
        self._steps = 0

    def on_step(self, state: TrainState) -> None:
        """Keep the code if it is time to look."""
        self._steps += 1
        if self._steps.bit_count() == 1:
            self._keep(is_last=False)

    def on_end(self, state: TrainState) -> None:
        """Keep what was compiled since then."""
        self._keep(is_last=True)

    def on_preempted(self, state: TrainState) -> None:
        """Keep it: the run has ended between two steps."""
        self._keep(is_last=True)

    def _keep(self, *, is_last: bool) -> None:
        if not (self._is_keeper and self._steps):
            return
        try:
            kept = self._cache.keep()
        except NotWholeError as error:
            if is_last:
                self._warn(str(error))
        except OSError as error:
            self._warn(error.strerror or str(error))
        except ValueError as error:
            self._is_keeper = False  # it only grows
            self._warn(str(error))
        else:
            if kept is not None and self._tells:
                self._tell(kept)

    def _warn(self, reason: str) -> None:
        """Say it; the log says each thing once."""
        told = f"{self._cache.pack} cannot be written ({reason}); until it is, the next start compiles again"
        log.warning(f"compiled code: {told}")

    def _tell(self, kept: Kept) -> None:
        removed = f"; removed {counted(kept.removed, 'old pack')}" if kept.removed else ""
        size = kept.size / 2**20
        kernels = counted(kept.kernels, "kernel")
        log.info(f"compiled code: {kernels} kept in {self._cache.pack} ({size:.1f} MiB){removed}")
