"""Names of DeepSpeed's calls in a backward pass, for a profile."""

from typing import Any

_HOOKS = ("process_gradients", "reduce_ready_partitions_and_remove_grads")
"""Called once per parameter whose gradient is complete; stages 1 and 2 have both, the second within the first."""
_REDUCTIONS = ("reduce_ipg_grads", "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads")
"""Reductions of a full bucket, of stages 1 and 2, and of stage 3."""


def named_calls(engine: Any) -> dict[str, list[tuple[object, str]]]:
    """Return (object, method) by the name of the range: ``hooks`` or ``reduce``."""
    optimizer = engine.optimizer
    hooks = [name for name in _HOOKS if hasattr(optimizer, name)][:1]
    reductions: list[tuple[object, str]] = [(optimizer, name) for name in _REDUCTIONS if hasattr(optimizer, name)]
    # Whatever is left at the end of the backward pass; at stage 0, all.
    return {"hooks": [(optimizer, name) for name in hooks], "reduce": [*reductions, (engine, "allreduce_gradients")]}
