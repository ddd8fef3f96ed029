"""Torch dispatch modes: checks of every operation inside a context."""

from collections import Counter
from contextlib import ExitStack
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from fastdiff.plugins.promises import NoHostSync


class Copies(TorchDispatchMode):
    """Counts the copies of tensors of four axes or of a whole map of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("clone", "copy_", "contiguous", "_to_copy") and args[0].dim() >= 3:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


class Strides(TorchDispatchMode):
    """Notes what is copied because of its strides, and the inputs of the project's ops that they would copy.

    Compiled code is seen only while it runs: compile before entering.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[tuple[int, ...]] = []
        """Shapes of the tensors of three axes or more that were copied, convolution weights excepted."""
        self.disordered: list[str] = []
        """Op, shape and strides of inputs of three axes or more that are neither contiguous nor channels_last."""
        self.ops: Counter[str] = Counter()
        """Calls of the ops of ``fastdiff_kernels``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("clone", "copy_") and args[0].dim() >= 3 and not _is_kernel(args[0]):
            self.copied.append(tuple(args[0].shape))
        if func.namespace == "fastdiff":
            self.ops[name] += 1
            tensors = [x for x in args if isinstance(x, torch.Tensor) and x.dim() >= 3]
            self.disordered += [f"{name} {tuple(x.shape)} {x.stride()}" for x in tensors if not _is_ordered(x, tensors)]
        return func(*args, **(kwargs or {}))


def _is_kernel(x: torch.Tensor) -> bool:
    return x.dim() == 4 and x.shape[2] == x.shape[3] == 3


def _is_ordered(x: torch.Tensor, others: list[torch.Tensor]) -> bool:
    """Whether ``x`` is contiguous; among maps that are channels_last, whether it is so too."""
    maps = any(other.dim() == 4 and not other.is_contiguous() for other in others)
    return x.is_contiguous(memory_format=torch.channels_last) if maps and x.dim() == 4 else x.is_contiguous()


class Operators(TorchDispatchMode):
    """Counts all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.total += 1
        return func(*args, **(kwargs or {}))


class Replay(NoHostSync):
    """Notes what a CUDA graph would hold: every operation, its numbers, and the tensors that it finds there.

    It fails on what a capture forbids. It keeps all tensors that it meets, so that none has the address of another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []
        """Name and arguments of each; of a tensor shape, dtype, strides and device."""
        self.found: dict[int, torch.Tensor] = {}
        """By address of their memory, the tensors that an operation used and none had made."""
        self._made: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_flatten((args, kwargs or {}))[0]
        self.operations.append(f"{func.name()}({', '.join(map(_described, given))})")
        for tensor in _with_memory(given):
            if tensor.untyped_storage().data_ptr() not in self._made:
                self.found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in _with_memory(tree_flatten(result)[0]):
            if tensor.untyped_storage().data_ptr() not in self.found:
                self._made[tensor.untyped_storage().data_ptr()] = tensor
        return result


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{tuple(value.shape)} {value.dtype} {value.stride()} {value.device}"


def _with_memory(values: list[Any]) -> list[torch.Tensor]:
    return [x for x in values if isinstance(x, torch.Tensor) and x.numel()]


_VIEWS = {
    "alias", "as_strided", "chunk", "detach", "expand", "flatten", "narrow", "permute", "reshape", "select", "set_",
    "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view",
    "_reshape_alias", "_unsafe_view",
}  # fmt: skip
_UNTOUCHED = _VIEWS | {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "lift_fresh",
    "resize_",
}
_WRITTEN = {"zeros", "zeros_like", "zero_", "new_zeros", "fill_", "ones", "ones_like", "_foreach_zero_"}
READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal")


class Costs(TorchDispatchMode):
    """Counts operations that touch memory, the bytes of their operands, and reads by the host.

    Reads are of single elements or lists, also of tensors on a CPU, which stands for a GPU here; copies from a GPU to
    the host; and waits for an event.

    An operand counts once as read and once as written; for an operation in place the schema says which is written.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.bytes = 0
        self.reads = 0
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        for owner, method in ((torch.Tensor, "tolist"), (torch.cuda.Event, "synchronize")):
            self._patches.enter_context(mock.patch.object(owner, method, self._counted(getattr(owner, method))))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patches.close()

    def _counted(self, own: Any) -> Any:
        """The method of a class, no operator of torch, counted as a read."""

        def read(of: Any) -> Any:
            self.reads += 1
            return own(of)

        return read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        self.reads += name in READS or _goes_to_the_host(name, args, found)
        if name not in _UNTOUCHED:
            self.operations[name] += 1
            self.bytes += _bytes_moved(func, name, args, kwargs or {}, found)
        return found


def _goes_to_the_host(name: str, args: Any, found: Any) -> bool:
    source = args[1] if name == "copy_" else args[0] if name == "_to_copy" else None
    return isinstance(source, Tensor) and source.is_cuda and found.device.type == "cpu"


def _bytes_moved(func: Any, name: str, args: Any, kwargs: Any, found: Any) -> int:
    written = [
        value
        for number, given in enumerate(func._schema.arguments)
        if given.alias_info is not None and given.alias_info.is_write
        for value in [args[number] if number < len(args) else kwargs.get(given.name)]
    ]
    outputs = written or [found]
    inputs: Any = [args[1:], kwargs] if name in ("copy_", "_foreach_copy_") else [args, kwargs]
    return _size(outputs) + (0 if name in _WRITTEN else _size(inputs))


def _size(tree: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_flatten(tree)[0] if isinstance(t, Tensor))
