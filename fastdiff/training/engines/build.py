"""Choice of the engine of a run."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from torch import nn

from fastdiff.config.deepspeed import DsConfig, zero_stage
from fastdiff.config.optimizers.registry import family_of, optimizers
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.optim import OptimConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.console import log
from fastdiff.errors import require
from fastdiff.models.build import Model
from fastdiff.parallel.world import World
from fastdiff.training.engines.base import Engine

Kind = Literal["deepspeed", "flat"]
_OWNED = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "bf16",
    "fp16", "data_types", "communication_data_type", "zero_optimization", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "timers",
}  # fmt: skip
"""Sections of the DeepSpeed JSON that say nothing more than the run does."""


def choose(
    optim: OptimConfig, performance: PerformanceConfig, ds_config: DsConfig, saved: Mapping[str, Any] | None = None
) -> Kind:
    """Return the engine of a run.

    Args:
        optim: of the run.
        performance: of the run.
        ds_config: the resolved DeepSpeed JSON.
        saved: the manifest of the checkpoint that the run resumes from; None: a new run. Under ``auto`` a run of ZeRO-0
            keeps its engine, if it can: the losses of two engines differ by rounding.

    Raises:
        ConfigError: the flat engine is asked for, and cannot train this run.
    """
    wanted, reason = performance.engine, _unsupported(optim, performance, ds_config)
    require(wanted != "flat" or reason is None, f"--performance.engine flat {reason}")
    if wanted != "auto":
        return wanted
    return "deepspeed" if reason is not None or _keeps_deepspeed(saved) else "flat"


def why_not_flat(
    optim: OptimConfig, performance: PerformanceConfig, ds_config: DsConfig, saved: Mapping[str, Any] | None = None
) -> str:
    """Return why ``choose`` takes DeepSpeed, and the remedy; empty: it takes the flat engine."""
    if choose(optim, performance, ds_config, saved) == "flat":
        return ""
    kept = "with a run that DeepSpeed has begun: use --performance.engine flat, whose losses differ by rounding"
    return _unsupported(optim, performance, ds_config) or kept


def _keeps_deepspeed(saved: Mapping[str, Any] | None) -> bool:
    return saved is not None and saved.get("zero_stage") == 0 and saved.get("engine", "deepspeed") == "deepspeed"


def _unsupported(optim: OptimConfig, performance: PerformanceConfig, ds_config: DsConfig) -> str | None:
    """Return why the flat engine cannot train this run, and the remedy; None if it can."""
    stage, others = zero_stage(ds_config), sorted(ds_config.keys() - _OWNED)
    zero = sorted(ds_config.get("zero_optimization", {}).keys() - {"stage"})
    if stage != 0:
        return f"with ZeRO stage {stage}: it is for stage 0; use --deepspeed_config ddp"
    if performance.precision == "fp16":
        return "with --performance.precision fp16: it does not scale the loss; use bf16 or fp32"
    if family_of(optim).flat_update is None:
        names = " or ".join(name for name, family in optimizers().items() if family.flat_update is not None)
        return f"with --optim.name {optim.name}: use {names}, or --performance.engine deepspeed"
    if others or zero:
        named = ", ".join([*others, *(f"zero_optimization.{name}" for name in zero)])
        return f"with a DeepSpeed JSON that has {named}: remove it, or use --performance.engine deepspeed"
    return None


def build_engine(
    model: Model,
    config: RunConfig,
    ds_config: DsConfig,
    world: World,
    blocks: Iterable[type[nn.Module]],
    saved: Mapping[str, Any] | None = None,
) -> Engine:
    """Build the engine that ``choose`` names; see there and the engines for the arguments."""
    optim, performance = config.optim, config.performance
    kind, before = choose(optim, performance, ds_config, saved), None if saved is None else saved.get("engine")
    if kind == "deepspeed" and before == "flat" and performance.engine == "auto" and world.is_first:
        reason = _unsupported(optim, performance, ds_config)
        log.warning(
            "the flat engine trained this run, DeepSpeed goes on; losses differ by rounding. No flat %s", reason
        )
    if kind == "flat":
        from fastdiff.training.engines.flat import FlatEngine

        return FlatEngine(model, config, ds_config, world)
    from fastdiff.training.engines.deepspeed import DeepSpeedEngine  # its import takes seconds

    return DeepSpeedEngine(model, config, ds_config, world, blocks)
