"""A GPU that is not present, as far as Inductor's code generation asks about it.

Inductor needs a device's properties to choose block sizes and to split reductions; it compiles and runs nothing here.
The replacements are global and stay: only a process of its own may call ``install``.
"""

import contextlib
import types
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch

from fastdiff_bench.instructions.gpus import GPUS


def install(arch: int) -> None:
    """Make torch, Inductor and Triton report one GPU of the compute capability ``arch`` (90 is sm_90)."""
    properties = _properties(arch)
    capability = divmod(arch, 10)
    cuda: Any = torch.cuda
    answers: dict[str, Any] = {
        "device_count": 1,
        "current_device": 0,
        "is_initialized": True,
        "_lazy_init": None,
        "init": None,
        "synchronize": None,
        "set_device": None,
        "is_bf16_supported": True,
        "get_device_properties": properties,
        "get_device_capability": capability,
        "get_device_name": properties.name,
    }
    for name, answer in answers.items():
        setattr(cuda, name, _constant(answer))
    cuda.device = lambda index: contextlib.nullcontext()
    _install_interface(properties, arch)
    _install_driver(arch, properties)
    _install_cudnn_layouts()
    _install_bias_sums()
    _install_constants()


def _constant(answer: Any) -> Any:
    return lambda *args, **kwargs: answer


def _properties(arch: int) -> types.SimpleNamespace:
    gpu, held = GPUS[arch], GPUS[arch].known_multiprocessors()
    major, minor = divmod(arch, 10)
    return types.SimpleNamespace(
        name=f"NVIDIA {gpu.name}",
        major=major,
        minor=minor,
        multi_processor_count=held.count,
        total_memory=int(gpu.memory_gib * 2**30),
        regs_per_multiprocessor=2**16,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        gcnArchName="",
        shared_memory_per_block=48 * 2**10,
        shared_memory_per_block_optin=held.shared_kib * 2**10,
        shared_memory_per_multiprocessor=(held.shared_kib + 1) * 2**10,
        L2_cache_size=held.l2_mib * 2**20,
        is_integrated=0,
        uuid="",
    )


def _install_interface(properties: Any, arch: int) -> None:
    """Replace the answers of Dynamo's device interface, which Inductor asks."""
    from torch._dynamo.device_interface import get_interface_for_device

    interface: Any = get_interface_for_device("cuda")
    answers: dict[str, Any] = {
        "get_device_properties": properties,
        "get_compute_capability": arch,
        "current_device": 0,
        "is_available": True,
        "is_bf16_supported": True,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
        "get_raw_stream": 0,
    }
    for name, answer in answers.items():
        setattr(interface, name, staticmethod(_constant(answer)))
    interface.Worker.get_device_properties = staticmethod(_constant(properties))
    interface.Worker.current_device = staticmethod(_constant(0))


def _install_driver(arch: int, properties: Any) -> None:
    """Give Triton a driver that names its target."""
    import triton
    from triton.backends.compiler import GPUTarget

    class Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", arch, 32)

        def get_current_device(self) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def get_device_interface(self) -> Any:
            return torch.cuda

    triton.runtime.driver.set_active(Driver())
    # Inductor's kernels would set a driver that they look for among the installed ones.
    from torch._inductor.runtime import triton_helpers

    helpers: Any = triton_helpers
    helpers.set_driver_to_gpu = _constant(None)


def _install_cudnn_layouts() -> None:
    """Let convolutions keep channels_last, as cuDNN does; a torch without CUDA would choose another backend."""
    from torch._prims_common import suggest_memory_format

    functions: Any = torch._C
    functions._conv_determine_backend_memory_format = lambda x, *args: suggest_memory_format(x)
    functions._select_conv_backend = lambda *args, **kwargs: functions._ConvBackend.Cudnn


def _install_bias_sums() -> None:
    """Let Inductor sum the gradients of convolutions' biases itself, as on CUDA, also in graphs traced on ``meta``."""
    from torch._inductor import decomposition

    functions: Any = decomposition
    functions.is_gpu = lambda device: device in ("cuda", "meta")


def _install_constants() -> None:
    """Let Inductor fold constants on the CPU: it would compute them on the GPU."""
    from torch._inductor.fx_passes import joint_graph

    folder: Any = joint_graph.UniformValueConstantFolder
    deduce = folder._deduce_value

    def on_cpu(self: Any, node: torch.fx.Node) -> Any:
        given = node.kwargs
        node.kwargs = {name: "cpu" if name == "device" else value for name, value in given.items()}
        try:
            return deduce(self, node)
        finally:
            node.kwargs = given

    folder._deduce_value = on_cpu


def present() -> AbstractContextManager[object]:
    """Report that there is a GPU, inside the block only: tracing and passes over graphs would allocate on it."""
    return patch.object(torch.cuda, "is_available", _constant(True))
