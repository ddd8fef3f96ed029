"""Choice of the engine of a run: the flat one where it can train the run, DeepSpeed otherwise."""

from collections.abc import Mapping
from typing import Any, Literal

from fastdiff.config.cuda_graph import Circumstances, require_static
from fastdiff.config.deepspeed import DsConfig, zero_stage
from fastdiff.config.optimizers.registry import family_of, optimizers
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.optim import OptimConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.errors import require

Kind = Literal["deepspeed", "flat"]
IN_ORDER = "--performance.grad_accum_order micro_batches"
_OWNED = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "bf16",
    "fp16", "data_types", "communication_data_type", "zero_optimization", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "timers",
}  # fmt: skip
"""Sections of the DeepSpeed JSON that say nothing more than the run does."""
_ORDERED = {
    "stage", "overlap_comm", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "allgather_partitions",
    "allgather_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    "stage3_gather_16bit_weights_on_model_save", "ignore_unused_parameters", "memory_efficient_linear",
}  # fmt: skip
"""Fields of ``zero_optimization`` that mean the same, or nothing, where gradients are added up in one order."""


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
        ConfigError: the flat engine, or sums in one order, are asked for, and this run cannot have them.
    """
    wanted, reason = performance.engine, unsupported(optim, performance, ds_config)
    require(wanted != "flat" or reason is None, f"--performance.engine flat {reason}")
    if performance.in_order:
        return _in_order(optim, wanted, ds_config, reason)
    if wanted != "auto":
        return wanted
    return "deepspeed" if reason is not None or _keeps_deepspeed(saved) else "flat"


def _in_order(optim: OptimConfig, wanted: str, ds_config: DsConfig, not_flat: str | None) -> Kind:
    """Return the engine that adds up gradients in one order: at stage 0 the flat one, else DeepSpeed."""
    if zero_stage(ds_config) > 0:
        lacks = _why_not_in_order(optim, ds_config)
        require(not lacks, f"{IN_ORDER} {lacks}")
        return "deepspeed"
    lacks = "with --performance.engine deepspeed: leave it out" if wanted == "deepspeed" else not_flat
    require(not lacks, f"{IN_ORDER} at ZeRO stage 0 needs the flat engine, and there is none {lacks}")
    return "flat"


def _why_not_in_order(optim: OptimConfig, ds_config: DsConfig) -> str | None:
    """Return what keeps sums in one order from the same bits under ZeRO-1 to 3, and the remedy; None: nothing."""
    if family_of(optim).ordered_arguments is None:
        names = ", ".join(name for name, family in optimizers().items() if family.ordered_arguments is not None)
        return f"with --optim.name {optim.name}, whose update may depend on how ranks cut the weights: use {names}"
    zero = ds_config["zero_optimization"]
    fields = sorted(name for name in zero.keys() - _ORDERED if not _is_off(zero[name]))
    if named := [*sorted(ds_config.keys() - _OWNED), *(f"zero_optimization.{name}" for name in fields)]:
        remedy = "remove it, or use --deepspeed_config zero1, zero2 or zero3"
        return f"with a DeepSpeed JSON that has {', '.join(named)}: {remedy}"
    return None


def _is_off(value: Any) -> bool:
    """Whether a field of ``zero_optimization`` asks for nothing, as ``{"device": "none"}`` does."""
    return not value or (isinstance(value, Mapping) and value.get("device", "none") == "none")


def why_not_flat(
    optim: OptimConfig, performance: PerformanceConfig, ds_config: DsConfig, saved: Mapping[str, Any] | None = None
) -> str:
    """Return why ``choose`` takes DeepSpeed, and the remedy; empty: it takes the flat engine."""
    if choose(optim, performance, ds_config, saved) == "flat":
        return ""
    kept = "with a run that DeepSpeed has begun: use --performance.engine flat, whose losses differ by rounding"
    return unsupported(optim, performance, ds_config) or kept


def require_engine(config: RunConfig, ds_config: DsConfig, device: str = "cuda") -> None:
    """Raise ConfigError if no engine can train a new run, or not the one that a flag or CUDA graphs need.

    Args:
        config: of the run.
        ds_config: the resolved DeepSpeed JSON.
        device: type of its device.
    """
    reason = why_not_flat(config.optim, config.performance, ds_config)
    require_static(Circumstances(config=config, device=device, not_flat=reason))
    require_loss_scale(config.performance.precision, zero_stage(ds_config))


def require_loss_scale(precision: str, stage: int) -> None:
    """Raise ConfigError for fp16 at ZeRO stage 0."""
    require(
        precision != "fp16" or stage > 0,
        "--performance.precision fp16 with ZeRO stage 0: DeepSpeed does not scale the loss there; "
        "use --deepspeed_config zero1, or --performance.precision bf16",
    )


def _keeps_deepspeed(saved: Mapping[str, Any] | None) -> bool:
    return saved is not None and saved.get("zero_stage") == 0 and saved.get("engine", "deepspeed") == "deepspeed"


def unsupported(optim: OptimConfig, performance: PerformanceConfig, ds_config: DsConfig) -> str | None:
    """Return why the flat engine cannot train this run, and the remedy; None if it can."""
    otherwise = "" if performance.in_order else ", or --performance.engine deepspeed"
    stage, others = zero_stage(ds_config), sorted(ds_config.keys() - _OWNED)
    zero = sorted(ds_config.get("zero_optimization", {}).keys() - {"stage"})
    if stage != 0:
        return f"with ZeRO stage {stage}: it is for stage 0; use --deepspeed_config ddp"
    if performance.precision == "fp16":
        return "with --performance.precision fp16: it does not scale the loss; use bf16 or fp32, or a higher stage"
    if family_of(optim).flat_update is None:
        names = " or ".join(name for name, family in optimizers().items() if family.flat_update is not None)
        return f"with --optim.name {optim.name}: use {names}{otherwise}"
    if others or zero:
        named = ", ".join([*others, *(f"zero_optimization.{name}" for name in zero)])
        return f"with a DeepSpeed JSON that has {named}: remove it{otherwise}"
    return None
