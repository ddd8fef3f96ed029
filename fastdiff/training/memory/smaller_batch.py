"""The micro-batch that a run folder remembers: half of the one for which the memory of a rank did not suffice.

The losses do not depend on the micro-batch beyond rounding, so the next start goes on with it from the newest
checkpoint: a supervisor starts the ranks again by itself, and under any other launcher the same command does it.
"""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fastdiff.config.deepspeed import DsConfig, offloads_optimizer, zero_stage
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.batch import micro_batches
from fastdiff.config.sections.optim import OptimConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.console import log
from fastdiff.errors import ConfigError, OutOfMemoryRestart
from fastdiff.files import publish
from fastdiff.models.cost.memory import half_of
from fastdiff.parallel.heartbeat import MICRO_LIMIT
from fastdiff.parallel.world import World
from fastdiff.run_files import read_inside
from fastdiff.training.state import TrainState

FILE = "micro-batch.json"
"""Name in the run folder."""
_MOST = 4096
"""Bytes of the file."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A micro-batch that fits better, and the run for which one did not fit."""

    micro: int
    ranks: int
    stage: int
    offload: bool
    precision: str
    recompute: bool
    stored_blocks: int
    optimizer: str


def _found(optim: OptimConfig, performance: PerformanceConfig, ds_config: DsConfig, ranks: int, micro: int) -> _Found:
    return _Found(
        micro=micro,
        ranks=ranks,
        stage=zero_stage(ds_config),
        offload=offloads_optimizer(ds_config),
        precision=performance.precision,
        recompute=performance.recompute,
        stored_blocks=performance.stored_blocks,
        optimizer=optim.name,
    )


def halve(state: TrainState, what: str) -> OutOfMemoryRestart | None:
    """Remember half of the micro-batch, or the largest divisor below; return the error that ends this rank.

    Args:
        state: of the run.
        what: ran out of memory where, for the message.

    Returns:
        None if there is no smaller one, or the run folder cannot be written; or the order of sums follows from the
        micro-batch (``--performance.grad_accum_order``), which only the user can change.
    """
    config, world = state.config, state.world
    if config.performance.in_order:
        return None
    micro = config.batch.per_rank(world.size)
    path = state.folder / FILE
    half = half_of(micro, config.objective.samples_together)
    if half == micro:
        with suppress(OSError):
            path.unlink(missing_ok=True)  # less did not help: a run that needs less elsewhere may take more again
        return None
    found = _found(config.optim, config.performance, state.engine.ds_config, world.size, half)
    try:
        publish(path, json.dumps(asdict(found), indent=1).encode() + b"\n")
    except OSError:
        return None
    stored = config.performance.stored_blocks
    others = f"; a smaller --performance.stored_blocks than {stored} may keep the {micro}" if stored else ""
    return OutOfMemoryRestart(
        f"{what}; the same command goes on in micro-batches of {half} samples per rank instead of {micro} "
        f"(--batch.micro), as {path} remembers; the losses are equal up to rounding{others}",
        micro=half,
    )


def limited(config: RunConfig, ds_config: DsConfig, world: World) -> RunConfig:
    """Return the run with the micro-batch for which the memory suffices, if its own is larger; called by all ranks.

    A run whose sums have the order of the micro-batches keeps its own.

    Raises:
        ConfigError: on every rank, if the file of the folder is damaged.
    """
    own = config.batch.per_rank(world.size)
    if config.performance.in_order:
        return config
    remembered, handed = world.on_rank0(lambda: (_remembered(config, ds_config, world.size), _handed(own)))
    most = min(remembered, handed)
    if own <= most:
        return config
    sizes = micro_batches(own, config.objective.samples_together) or [own]
    micro = next((size for size in sizes if size <= most), sizes[-1])  # the batch may be another than that run's
    if world.is_first:
        file = f", see {Path(config.output.folder) / FILE}; to try {own} again delete that file"
        log.warning(
            f"in micro-batches of {micro} samples per rank, not {own} (--batch.micro): memory did not suffice for more "
            f"before{file if remembered == most else ''}"
        )
    return replace(config, batch=replace(config.batch, micro=micro))


def _handed(own: int) -> int:
    """Return the micro-batch with which the supervisor has started the ranks again; that of the run at first."""
    return int(os.environ.get(MICRO_LIMIT, own))


def _remembered(config: RunConfig, ds_config: DsConfig, ranks: int) -> int:
    """Return the micro-batch that the folder remembers for this run, otherwise its own.

    Ranks, ZeRO stage, offloading, precision, recomputed blocks and optimizer must be those for which the memory did
    not suffice: with others it may.
    """
    own, found = config.batch.per_rank(ranks), _read(Path(config.output.folder))
    if found is None:
        return own
    this = _found(config.optim, config.performance, ds_config, ranks, found["micro"])
    return int(found["micro"]) if found == asdict(this) else own


def _read(run: Path) -> dict[str, Any] | None:
    """Return what the folder remembers; None without a file."""
    try:
        found = json.loads(read_inside(run, FILE, _MOST))
        if type(found["micro"]) is not int or found["micro"] < 1:
            raise ValueError(f"micro is {found['micro']}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{run / FILE} cannot be read ({type(error).__name__}: {error}); delete it") from None
    return found  # type: ignore[no-any-return]
