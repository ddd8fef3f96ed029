"""The dtype in which DeepSpeed adds up the gradients of 16-bit parameters: fp32, where it has none or another."""

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
