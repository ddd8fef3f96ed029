"""Recorded launches of the kernels of fastdiff_kernels: from the call of an op to compiled code."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastdiff_bench.instructions.bounds import Launched
from fastdiff_bench.instructions.count import count
from fastdiff_bench.instructions.gpus import GPUS
from fastdiff_kernels import launch
from fastdiff_kernels.launch import Launch


def launcher(operator: Any) -> Any:
    """Return the function that a custom op of torch.library wraps."""
    from torch._library.custom_ops import OPDEFS

    return OPDEFS[f"{operator.namespace}::{operator._opname}"]._init_fn


def recording(arch: int) -> AbstractContextManager[list[Launch]]:
    """Record launches as on the GPU of a compute capability, 90 for sm_90."""
    return launch.recording(arch, GPUS[arch].known_multiprocessors().count)


class Launching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets a custom op of fastdiff launch its kernels on tensors without memory, too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = launcher(func) if func.namespace == "fastdiff" else func
        return function(*args, **(kwargs or {}))


def specialise(recorded: Launch, arch: int) -> tuple[Any, dict[str, Any]]:
    """Return the kernel with its arguments specialized by Triton's launcher, and its compile options."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel = recorded.kernel
    backend = make_backend(GPUTarget("cuda", arch, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    given = {"debug": False} | recorded.options
    bound, specialization, _ = bind(*recorded.args, **given)
    options, signature, constants, attributes = kernel._pack_args(backend, given, bound, specialization, None)
    return ASTSource(kernel, signature, constants, attributes), options.__dict__


def compiled_for(arch: int, source: Any, options: dict[str, Any] | None = None) -> Any:
    """Return a specialized kernel, compiled by Triton."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as compile_kernel

    return compile_kernel(source, target=GPUTarget("cuda", arch, 32), options=options)


def given(recorded: Launch, source: Any) -> list[Any]:
    """Return the arguments that the compiled kernel has as parameters: all but constexprs, members of tuples singly."""
    pairs = _one_by_one(zip(recorded.args, source.signature.values(), strict=False))
    return [argument for argument, kind in pairs if kind != "constexpr"]


def _one_by_one(pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    for argument, kind in pairs:
        if isinstance(kind, tuple):
            yield from zip(argument, kind, strict=True)
        else:
            yield argument, kind


def counted(recorded: Launch, arch: int) -> Launched | None:
    """Compile a launch and count it; None: it does not fit the GPU."""
    source, options = specialise(recorded, arch)
    compiled = compiled_for(arch, source, options)
    if not compiled.asm.get("cubin"):
        return None
    arguments = given(recorded, source)
    tensors = list({id(one): one for one in arguments if isinstance(one, Tensor)}.values())
    return count(
        recorded.kernel.__name__, compiled, arch, recorded.grid, arguments,
        moved=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        elements=max((tensor.numel() for tensor in tensors), default=0),
    )  # fmt: skip
