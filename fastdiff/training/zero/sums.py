"""The dtype in which DeepSpeed adds up the gradients of 16-bit parameters: fp32, where it has none or another."""

from __future__ import annotations

from typing import Any

import torch


def collect_in_fp32(engine: Any) -> None:
    """Let autograd keep the gradients of 16-bit parameters in fp32 (ZeRO-0)."""
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad_dtype = torch.float32
    collect = engine._get_gradients_for_reduction

    def collect_all() -> Any:
        for parameter in trained:
            if parameter.grad is None:  # DeepSpeed would fill in zeros of the parameter's dtype
                parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
        return collect()

    engine._get_gradients_for_reduction = collect_all


def widen(engine: Any, stage: int) -> None:
    """Add up in fp32 from here on, between two steps of an engine that had nothing to add up.

    The result equals that of an engine which DeepSpeed has built for it.

    Args:
        engine: of DeepSpeed.
        stage: ZeRO stage.
    """
    engine.communication_data_type = torch.float32
    if stage == 0:
        collect_in_fp32(engine)
        return
    optimizer = engine.optimizer
    optimizer.gradient_accumulation_dtype = optimizer.communication_data_type = torch.float32
    [bucket] = optimizer.ipg_buckets.values()
    optimizer.ipg_buckets = {torch.float32: bucket}
    if stage < 3:
        optimizer.use_separate_grad_accum = True
        optimizer.use_grad_accum_attribute = not optimizer.partition_gradients
        return
    bucket.buffer = bucket.buffer.float()
    optimizer.grad_partitions_flat_buffer = wide = optimizer.grad_partitions_flat_buffer.float()
    parts: dict[int, torch.Tensor] = optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
    for key, part in parts.items():
        parts[key] = wide.narrow(0, part.storage_offset(), part.numel())
