"""A preset's network on the device ``meta``, with blocks compiled by the emitter, run forward and backward once."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fastdiff.batch import Condition
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.models import fp8
from fastdiff.models.build import Model, build_model
from fastdiff.models.cost.dry_network import dry_inputs
from fastdiff.models.cost.flops import training_flops
from fastdiff.training.buffers import places_of
from fastdiff_bench.emission.blocks import Emission
from fastdiff_bench.emission.lowering import META, Emitter
from fastdiff_bench.emission.opaque import Seen
from fastdiff_bench.instructions.launches import recording
from fastdiff_kernels import attention, dispatch, launch, packed_attention
from fastdiff_kernels.attention import Machine
from fastdiff_kernels.names import OPS, Backend

CUDNN = 91501
"""Version of cuDNN that attention believes in: the first that takes any length."""

_TRITON: Backend = "triton"
_PLAIN = PerformanceConfig()


def emit(
    config: ModelConfig,
    batch: int,
    arch: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    performance: PerformanceConfig = _PLAIN,
    instructions: bool = False,
) -> Emission:
    """Return the counts of a network; ``fake_gpu.install`` must have been called.

    Args:
        config: shape of the network.
        batch: samples per micro-batch.
        arch: compute capability of the GPU: 90 is sm_90.
        dtype: of weights and activations.
        performance: says which blocks multiply in FP8, and the backend of attention.
        instructions: compile the kernels of the blocks, and count their instructions.
    """
    emitter = Emitter(arch if instructions else None)
    with torch.device(META):
        model = build_model(config, attention=performance.attention).to(dtype)
    _lay_out(model, dtype)
    if performance.fp8:
        fp8.convert(model, performance, META)
        model.scales.end_warm_up()
    _name_running_block(model, emitter)
    with ExitStack() as stack:
        stack.enter_context(recording(arch))
        # Dynamo cannot tell of tensors on ``meta`` whether they are on CUDA.
        stack.enter_context(patch.object(launch, "runs_on", lambda tensor: True))
        stack.enter_context(dispatch.forced(**dict.fromkeys(OPS, _TRITON)))
        stack.enter_context(_attention_on(Machine("cuda", divmod(arch, 10), CUDNN)))
        stack.enter_context(_counted_tangents(emitter))
        stack.enter_context(_convolutions_keep_channels_last())
        model.compile_blocks(backend=emitter.compile)
        with torch.device(META):
            given = _inputs(model, batch, dtype)
        _step(model, given)
        emitter.counting = False
        with Seen() as outside:
            _step(model, given)
    blocks = list(emitter.blocks.values())
    moved = outside.bytes - sum(block.restrided_bytes for block in blocks)
    parameters = list(model.parameters())
    return Emission(
        blocks=blocks,
        batch=batch,
        parameters=sum(parameter.numel() for parameter in parameters),
        tensors=len(parameters),
        flops=training_flops(config),
        outside_bytes=moved / batch,
        instructions=instructions,
    )


def _lay_out(model: Model, dtype: torch.dtype) -> None:
    """Let the weights lie as in the flat engine with AdamW."""
    places = places_of(model, channels_last=model.channels_last)
    buffer = torch.empty(places[-1].end, dtype=dtype, device=META)
    for place in places:
        place.parameter.data = place.of(buffer)


def _step(model: Model, given: tuple[Tensor, Tensor, Condition]) -> None:
    model.zero_grad(set_to_none=True)
    noisy, time, condition = given
    out = model(noisy, time, **condition)
    out.backward(torch.empty_like(out))


def _inputs(model: Model, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Condition]:
    """Return blank noisy latents, times and conditions of a network."""
    noisy, condition = dry_inputs(model.config, model.inputs, batch)
    rounded = {name: value.to(dtype) if value.is_floating_point() else value for name, value in condition.items()}
    return noisy.to(dtype), torch.empty(batch, dtype=torch.int64), rounded


def _name_running_block(model: Model, emitter: Emitter) -> None:
    """Tell the emitter which block's forward begins."""

    def entered(kind: str, name: str) -> Any:
        def hook(module: torch.nn.Module, arguments: Any) -> None:
            emitter.running = (kind, name)

        return hook

    for name, module in model.named_modules():
        if isinstance(module, model.block_classes):
            module.register_forward_pre_hook(entered(type(module).__name__, name))


@contextmanager
def _attention_on(here: Machine) -> Iterator[None]:
    """Let attention choose its kernel as on ``here``, whatever this one has."""

    def machine(device: torch.device, asked: str = "auto") -> Machine:
        return here

    def chosen(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        case = (query.dtype, query.shape[-1], query.shape[-2], key.shape[-2], machine(query.device))
        first = attention._order("auto", case)[0]
        if first == torch.nn.attention.SDPBackend.CUDNN_ATTENTION:
            out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True)[0]
        else:
            out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]
        return out

    # Dynamo guards the result of a constant function by the function's name.
    machine._dynamo_marked_constant = True  # type: ignore[attr-defined]
    functions = SimpleNamespace(scaled_dot_product_attention=chosen)
    # The other module has imported the name.
    with patch.multiple(attention, machine=machine, F=functions), patch.object(packed_attention, "machine", machine):
        yield


@contextmanager
def _counted_tangents(emitter: Emitter) -> Iterator[None]:
    """Count the gradients that AOTAutograd copies into the strides that a backward graph was traced with."""
    from torch._functorch._aot_autograd import runtime_wrappers

    before = runtime_wrappers.coerce_to_expected_memory_format

    def counted(gradient: Tensor, expected: Any) -> Tensor:
        result: Tensor = before(gradient, expected)
        emitter.arrived(gradient, copied=result is not gradient)
        return result

    with patch.object(runtime_wrappers, "coerce_to_expected_memory_format", counted):
        yield


@contextmanager
def _convolutions_keep_channels_last() -> Iterator[None]:
    """Let convolutions on ``meta`` return the layout of cuDNN: channels_last for channels_last inputs."""
    from torch._meta_registrations import meta_conv
    from torch._prims_common import suggest_memory_format

    def convolution(x: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
        out: Tensor = meta_conv(x, weight, *arguments)
        return out.to(memory_format=suggest_memory_format(x))

    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("convolution", convolution, "Meta", allow_override=True)
    try:
        yield
    finally:
        library._destroy()
