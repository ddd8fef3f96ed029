"""Work of DeepSpeed's ZeRO-3 that a step can do without; its results are equal to the bit, if every parameter is used.

- Its linear layer adds the bias in an operation of its own: the whole output is read and written again, and in 16 bits
  rounded twice, unlike at other stages.
- A single rank joins its gradients, divides them by one, sends them to itself and cuts them up.
- It also copies each gradient into a bucket that it does not send, and its hooks gather and release parameters that it
  holds whole. Here they stay, without hooks around its layers.
- Gradients of a bucket are added to those of the step one by one. Here that is one operation.
- The fp32 gradients of a step are joined in new memory, although they lie side by side. Its parameters, which lie so,
  too, are pointed anew to where they are.
- After a step every small parameter is gathered alone. Here all are sent at once.
- A single rank also sends a parameter to itself that the network reads outside of its layer. On a CPU that starts
  threads of OpenMP in a thread of gloo; with more of them than cores, all wait asleep between operators from then on.
- Around every layer its parameters are searched for among its modules, the signature of each autograd function is read
  anew, and NVTX ranges and messages are prepared that nobody asked for.

Of a parameter that gets no gradient in a step DeepSpeed's ZeRO-3 applies the last one again. Here it counts as zero, as
at other stages; with an optimizer on the host it stays as it is.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import chain
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import (
    linear,
    parameter_offload,
    partition_parameters,
    partitioned_param_coordinator,
    stage3,
)
from torch import Tensor, nn

_join_and_scatter = stage3.reduce_scatter_coalesced


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch._C._nn.linear(x, weight, bias)


def _scatter(gradients: list[Tensor], group: Any = None) -> list[Tensor]:
    if torch.distributed.get_world_size(group) > 1:
        return _join_and_scatter(gradients, group)  # type: ignore[no-any-return]
    return [gradient.reshape(-1) for gradient in gradients]


_gather_one_by_one = partition_parameters.Init._allgather_params_sequential


def _gather(own: Any, parameters: list[nn.Parameter], hierarchy: int = 0) -> None:
    if any(own._partition_world_size(p) > 1 for p in parameters):
        return _gather_one_by_one(own, parameters, hierarchy)  # type: ignore[no-any-return]
    return own._allgather_params_coalesced(parameters, hierarchy)  # type: ignore[no-any-return]


_gather_each = partition_parameters.Init._allgather_params_coalesced


def _gather_at_once(own: Any, parameters: list[nn.Parameter], hierarchy: int = 0, quantize: bool = False) -> None:
    if not parameters or quantize or own.zero_param_process_group is not None:
        return _gather_each(own, parameters, hierarchy, quantize)  # type: ignore[no-any-return]
    parameters[0].all_gather_coalesced(parameters).wait()  # type: ignore[attr-defined]


_found: WeakKeyDictionary[nn.Module, dict[bool, list[nn.Parameter]]] = WeakKeyDictionary()
"""Parameters of a module by whether those of the modules in it are among them; ZeRO-3 keeps the objects."""


def _parameters(module: nn.Module, recurse: bool = False) -> Iterator[nn.Parameter]:
    of_module = _found.setdefault(module, {})
    if recurse not in of_module:
        of_module[recurse] = list(module.parameters(recurse=recurse))
    return chain(of_module[recurse], (p for _, p in module.ds_external_parameters()))  # type: ignore[operator]


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function, and keep it where ``inspect`` looks first."""
    known: inspect.Signature | None = function.__dict__.get("__signature__")
    if known is None:
        known = function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return known


_print = partition_parameters.print_rank_0


def _print_if_asked(message: str, debug: bool = False, force: bool = False) -> None:
    if debug or force:  # otherwise it would only look up its rank
        _print(message, debug, force)


linear.LinearFunctionForZeroStage3.forward = staticmethod(_linear)
stage3.reduce_scatter_coalesced = _scatter
partition_parameters.Init._allgather_params_sequential = _gather
partition_parameters.Init._allgather_params_coalesced = _gather_at_once
partitioned_param_coordinator.iter_params = parameter_offload.iter_params = _parameters
partition_parameters.print_rank_0 = _print_if_asked
import_module("deepspeed.utils.nvtx").enable_nvtx = False  # type: ignore[attr-defined]
import_module("torch.autograd.function").inspect = SimpleNamespace(signature=_signature)  # type: ignore[attr-defined]


def keep_whole(wrapper: Any) -> None:
    """Let a single rank gather its parameters once, and reduce gradients from where they are; otherwise a no-op."""
    parameters = list(wrapper.module.parameters())
    stored = wrapper.offload_param or any(hasattr(p.ds_tensor, "ds_quant_scale") for p in parameters)
    if stored or torch.distributed.get_world_size(wrapper.dp_process_group) > 1:
        return
    wrapper.contiguous_gradients = False
    for bucket in wrapper.ipg_buckets.values():
        bucket.buffer = None
    parameters[0].all_gather(parameters)
    for p in parameters:
        p.partition = _release_nothing
    wrapper._partition_all_parameters = _release_nothing
    wrapper.parameter_offload._remove_module_hooks()


def _release_nothing(*_: Any, **__: Any) -> None:
    """The memory of a whole parameter is that of its only part, which a step changes in place."""


def leave_parameters_in_place(wrapper: Any) -> None:
    """Point parameters to their parts after a step only if they lie elsewhere."""
    pairs = list(zip(wrapper.fp16_partitioned_groups_flat, wrapper.fp16_partitioned_groups, strict=True))
    if all(flat is not None and flat.data_ptr() == parts[0].data_ptr() and _adjoin(parts) for flat, parts in pairs):
        wrapper._unflatten_partitioned_parameters = lambda group: None


def leave_gradients_in_place(wrapper: Any) -> None:
    """Let the optimizer of ZeRO-3 read gradients where they were added up; with an optimizer on the host a no-op."""
    if not wrapper.offload_optimizer:
        wrapper.partition_grads = partial(_add_up, wrapper)
        own = wrapper._prepare_fp32_grad_for_sub_group
        wrapper._prepare_fp32_grad_for_sub_group = partial(_set_gradient, wrapper, own)
        wrapper.independent_gradient_partition_epilogue = partial(
            _end_backward, wrapper, wrapper.independent_gradient_partition_epilogue
        )


def _add_up(wrapper: Any, parameters: list[nn.Parameter], parts: list[Tensor]) -> None:
    """Copy the reduced gradients of a bucket to those of the step, or add them from the second micro-batch on."""
    sums, known = [], wrapper._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
    added, synchronous, rank = [], get_accelerator().is_synchronized_device(), wrapper._get_param_partition_rank
    for p, part in zip(parameters, parts, strict=True):
        if not synchronous and p.grad is not None:
            p.grad.record_stream(get_accelerator().current_stream())
        p.grad = None
        if p.partition_numel() * rank(p) < p.ds_numel:  # type: ignore[attr-defined, operator]
            wrapper._offload_boundary_param_ids.add(p.ds_id)  # type: ignore[attr-defined]
            total = known[p.ds_id]  # type: ignore[attr-defined]
            sums.append(total if total.numel() == part.numel() else total[: part.numel()])
            added.append(part)
    if sums:
        (torch._foreach_copy_ if wrapper.micro_step_id == 0 else torch._foreach_add_)(sums, added)


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
