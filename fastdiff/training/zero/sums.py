"""Sums of the gradients of 16-bit parameters, where DeepSpeed has them in another dtype or keeps them too long."""

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


def drop_sums_of_skipped_steps(wrapper: Any) -> None:
    """Let ZeRO-1 and 2 with an optimizer on the CPU drop its fp32 sums after a step that changed nothing.

    DeepSpeed keeps them there, so a gradient that was not finite once would make all steps after it void.
    """
    reset = wrapper.reset_cpu_buffers

    def reset_all() -> None:
        reset()
        for group in wrapper.averaged_gradients:
            wrapper.averaged_gradients[group] = None

    wrapper.reset_cpu_buffers = reset_all
