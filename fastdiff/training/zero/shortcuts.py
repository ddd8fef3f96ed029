"""Work of DeepSpeed's ZeRO-3 that a step can do without; its results are equal to the bit, if every parameter is used.

- Its linear layer adds the bias in an operation of its own: the whole output is read and written again, and in 16 bits
  rounded twice, unlike at other stages.
- A single rank joins its gradients, divides them by one, sends them to itself and cuts them up.
- The fp32 gradients of a step are joined in new memory, although they lie side by side.

Of a parameter that gets no gradient in a step DeepSpeed's ZeRO-3 applies the last one again. Here it counts as zero, as
at other stages; with an optimizer on the host it stays as it is.
"""

from functools import partial
from typing import Any

import torch
from deepspeed.runtime.zero import linear, stage3
from torch import Tensor

_join_and_scatter = stage3.reduce_scatter_coalesced


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch._C._nn.linear(x, weight, bias)


def _scatter(gradients: list[Tensor], group: Any = None) -> list[Tensor]:
    if torch.distributed.get_world_size(group) > 1:
        return _join_and_scatter(gradients, group)  # type: ignore[no-any-return]
    return [gradient.view(-1) for gradient in gradients]


linear.LinearFunctionForZeroStage3.forward = staticmethod(_linear)
stage3.reduce_scatter_coalesced = _scatter


def leave_gradients_in_place(wrapper: Any) -> None:
    """Let the optimizer of ZeRO-3 read gradients where they were added up; with an optimizer on the host a no-op."""
    if not wrapper.offload_optimizer:
        own = wrapper._prepare_fp32_grad_for_sub_group
        wrapper._prepare_fp32_grad_for_sub_group = partial(_set_gradient, wrapper, own)
        wrapper.independent_gradient_partition_epilogue = partial(
            _end_backward, wrapper, wrapper.independent_gradient_partition_epilogue
        )


def _end_backward(wrapper: Any, own: Any) -> None:
    """Clear the gradients of parameters that have had none since the last step: the buffer holds those of that step."""
    own()
    given, rank = wrapper._offload_boundary_param_ids, wrapper._get_param_partition_rank
    for group, parameters in enumerate(wrapper.fp16_groups):
        for p, gradient in zip(parameters, wrapper.averaged_gradients[group], strict=True):
            if p.ds_id not in given and p.partition_numel() * rank(p) < p.ds_numel:  # else padding alone
                gradient.zero_()


def _set_gradient(wrapper: Any, otherwise: Any, group: int) -> None:
    flat, parts = wrapper.fp32_partitioned_groups_flat[group], wrapper.averaged_gradients[group]
    if parts[0].dtype != flat.dtype or not _adjoin(parts) or sum(p.numel() for p in parts) != flat.numel():
        otherwise(group)
        return
    flat.grad = torch.as_strided(parts[0], (flat.numel(),), (1,))
    wrapper.averaged_gradients[group] = None


def _adjoin(parts: list[Tensor]) -> bool:
    """Whether flat tensors follow one another in one memory."""
    place, memory = parts[0].storage_offset(), parts[0].untyped_storage().data_ptr()
    for part in parts:
        if part.untyped_storage().data_ptr() != memory or part.storage_offset() != place or not part.is_contiguous():
            return False
        place += part.numel()
    return True
