"""Construction of the engine of a run."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from fastdiff.config.deepspeed import DsConfig
from fastdiff.config.engine import choose, unsupported
from fastdiff.config.run import RunConfig
from fastdiff.console import log
from fastdiff.models.build import Model
from fastdiff.parallel.world import World
from fastdiff.training.engines.base import Engine


def build_engine(
    model: Model,
    config: RunConfig,
    ds_config: DsConfig,
    world: World,
    blocks: Iterable[type[nn.Module]],
    saved: Mapping[str, Any] | None = None,
) -> Engine:
    """Build the engine that ``config.engine.choose`` names; see there and the engines for the arguments."""
    optim, performance = config.optim, config.performance
    kind, before = choose(optim, performance, ds_config, saved), None if saved is None else saved.get("engine")
    if kind == "deepspeed" and before == "flat" and performance.engine == "auto" and world.is_first:
        reason = unsupported(optim, performance, ds_config)
        log.warning(
            "the flat engine trained this run, DeepSpeed goes on; losses differ by rounding. No flat %s", reason
        )
    if kind == "flat":
        from fastdiff.training.engines.flat import FlatEngine

        return FlatEngine(model, config, ds_config, world)
    from fastdiff.training.engines.deepspeed import DeepSpeedEngine  # its import takes seconds

    return DeepSpeedEngine(model, config, ds_config, world, blocks)
