"""Activations that a network keeps for its backward pass, counted without memory and without a GPU."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor

from fastdiff.batch import Condition
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.models.build import Model
from fastdiff.models.cost.dry_network import dry_network
from fastdiff.models.kernel_choice import DTYPES
from fastdiff_kernels import dispatch, launch
from fastdiff_kernels.names import OPS, AttentionBackend, Backend


def saved_bytes(config: RunConfig, noisy: Tensor, condition: Condition, device: torch.device) -> float:
    """Return the bytes per sample that autograd saves in a forward pass, parameters not counted.

    The forward pass runs on tensors without data and takes a second. Each memory counts once, however many layers save
    it. Compiled blocks save as much: Inductor computes again what is cheap, and the kernels keep as little by
    themselves (a block of DiT-XL/2 saves 34.2 bytes per token and channel either way). With a LoRA, layers without a
    trained weight save what the gradient of their input needs.

    Args:
        config: of the run; ``--performance.recompute`` is not regarded.
        noisy: ``[B, C, H, W]``, only its shape counts; B at least 2, because one sample has other strides.
        condition: inputs of the network, as in a batch of B samples.
        device: of the run, which decides between kernels and references.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # its import takes a second

    performance = config.performance
    attention: AttentionBackend = performance.attention
    attention = attention if attention == "reference" else "sdpa"  # the others save the same, but not on the CPU
    network = dry_network(config, attention=attention)
    kept: dict[int, Tensor] = {}
    with ExitStack() as stack:
        stack.enter_context(launch.recording())  # the tensors are on the CPU, also those of a GPU's kernels
        stack.enter_context(dispatch.forced(**op_backends(config.performance, device)))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        weights = cast_weights(network, DTYPES[performance.precision])
        own = {_memory(value) for value in weights.values()}

        def keep(value: Tensor) -> Tensor:
            if _memory(value) not in own:
                kept[_memory(value)] = value  # held, so that its memory is not given to another
            return value

        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value))
        inputs = (torch.empty(noisy.shape), torch.zeros(len(noisy)))
        torch.func.functional_call(network, weights, inputs, condition)  # type: ignore[no-untyped-call]
        return sum(value.untyped_storage().nbytes() for value in kept.values()) / len(noisy)


def op_backends(performance: PerformanceConfig, device: torch.device) -> dict[str, Backend]:
    """Return the backend of each op; a compiled reference saves about as much as the plain one."""
    default: Backend = "triton" if device.type == "cuda" and launch.triton is not None else "reference"
    chosen = dict.fromkeys(OPS, default) | performance.kernel_backends()
    return {op: "reference" if backend == "compile" else backend for op, backend in chosen.items()}


def cast_weights(network: Model, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return parameters and buffers as they are in training; called in a ``FakeTensorMode``."""
    found: dict[str, Tensor] = {}
    for name, value in (*network.named_parameters(), *network.named_buffers()):
        cast = dtype if value.is_floating_point() else value.dtype
        found[name] = torch.empty(value.shape, dtype=cast, requires_grad=value.requires_grad)
    return found


def _memory(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)
