"""Construction of the engine of a run."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fastdiff.config.deepspeed import DsConfig
from fastdiff.config.engine import Kind, choose, unsupported
from fastdiff.config.run import RunConfig
from fastdiff.console import log
from fastdiff.models.build import Model
from fastdiff.parallel.world import World
from fastdiff.training.engines.base import Engine
from fastdiff.training.engines.joined_uses import join_uses


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
    differ = kind == "deepspeed" and before == "flat" and performance.engine == "auto" and not performance.in_order
    if differ and world.is_first:
        reason = unsupported(optim, performance, ds_config)
        log.warning(
            "the flat engine trained this run, DeepSpeed goes on; losses differ by rounding. No flat %s", reason
        )
    if performance.in_order:
        join_uses(model, blocks := tuple(blocks))
        _warn_of_addresses(kind, world)
    if kind == "flat":
        from fastdiff.training.engines.flat import FlatEngine

        return FlatEngine(model, config, ds_config, world)
    from fastdiff.training.engines.deepspeed import DeepSpeedEngine  # its import takes seconds

    return DeepSpeedEngine(model, config, ds_config, world, blocks)


def _warn_of_addresses(kind: Kind, world: World) -> None:
    """Warn that MKL may round otherwise at other addresses: under ZeRO weights lie side by side, elsewhere aligned."""
    unset = torch._C.has_mkl and "MKL_CBWR" not in os.environ
    if kind == "deepspeed" and world.device.type == "cpu" and world.is_first and unset:
        log.warning(
            "--performance.grad_accum_order micro_batches on a CPU: MKL may round by the address of a weight, which "
            "ZeRO changes; for equal bits set MKL_CBWR=COMPATIBLE in the environment of every run"
        )
