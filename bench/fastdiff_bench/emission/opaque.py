"""Launches and copies inside the custom ops of fastdiff_kernels, which are opaque to Inductor.

The launcher of an op runs on tensors of the device ``meta`` in the layouts that the graph gives it; its kernels are
recorded instead of launched, and every op of torch that it calls is seen.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fastdiff_bench import BenchError
from fastdiff_bench.emission.blocks import Opaque
from fastdiff_bench.instructions.bounds import Launched
from fastdiff_bench.instructions.launches import counted, launcher
from fastdiff_kernels import launch


def of_fastdiff(node: fx.Node) -> bool:
    """Whether a node of a graph calls a custom op of fastdiff_kernels."""
    return node.op == "call_function" and getattr(node.target, "namespace", "") == "fastdiff"


def launched(node: fx.Node, arch: int | None = None) -> Opaque:
    """Run the launcher of a custom op on blanks in the layouts of its arguments, and count.

    Args:
        node: of the graph.
        arch: compute capability for which its kernels are compiled and counted; None: they are not.
    """
    operator: Any = node.target
    # Where a mode of fake tensors is active, blanks would be such, which have no address to specialise by.
    with unset_fake_temporarily(), torch.no_grad(), launch.recording() as launches, Seen() as seen:
        arguments, options = pytree.tree_map(blank, (node.args, node.kwargs))
        launcher(operator)(*arguments, **options)
    moved = sum(_bytes(one.args) for one in launches)
    kernels = [] if arch is None else [_counted(one, arch) for one in launches]
    return Opaque(
        str(operator), len(launches) + seen.kernels, moved + seen.bytes, seen.copies, seen.copied_bytes, kernels
    )  # fmt: skip


def _counted(one: launch.Launch, arch: int) -> Launched:
    found = counted(one, arch)
    if found is None:
        raise BenchError(f"{one.kernel.__name__} does not fit a GPU of sm_{arch}, so its network has no prediction")
    return found


def blank(value: Any) -> Any:
    """Return an empty tensor on ``meta`` in the layout of a node or a tensor; other values stay."""
    found = value.meta.get("val") if isinstance(value, fx.Node) else value
    if not isinstance(found, Tensor):
        return found
    return torch.empty_strided(tuple(found.shape), found.stride(), dtype=found.dtype, device="meta")


def _bytes(values: Any) -> int:
    """Bytes of the tensors in a structure, each counted once."""
    tensors = {id(value): value for value in pytree.tree_leaves(values) if isinstance(value, Tensor)}
    return sum(value.numel() * value.element_size() for value in tensors.values())


_FREE = frozenset(
    (
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "view", "_unsafe_view", "reshape",
        "permute", "transpose", "t", "select", "slice", "as_strided", "expand", "squeeze", "unsqueeze", "unbind",
        "split", "split_with_sizes", "detach", "alias", "movedim", "_reshape_alias", "unfold", "narrow", "device",
    )
)  # fmt: skip
"""Operations that launch nothing: those that make views, and the question for a device."""


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of the kernels of torch that eager code calls, and of the bytes of their operands."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let functions that are compiled already run as such."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = self.bytes = self.copied_bytes = 0
        self.copies: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._opname
        if name not in _FREE:
            moved = 2 * _bytes(result) if name in ("clone", "copy_") else _bytes((args, kwargs, result))
            self.kernels += 1
            self.bytes += moved
            if name in ("clone", "copy_"):
                self.copies.append(tuple(result.shape))
                self.copied_bytes += moved
        return result
