"""A forward and backward pass that is run without data: its operations, the bytes it moves, and those it holds at once.

Every tensor is fake: it has a shape, a dtype and a lifetime, but no memory. What lives at the same time is therefore
what lives at the same time in eager execution, with the workspaces of libraries left out.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastdiff.batch import Condition
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.models.build import Model
from fastdiff.models.cost.dry_network import dry_network
from fastdiff.models.kernel_choice import DTYPES
from fastdiff_kernels import dispatch, launch
from fastdiff_kernels.names import OPS, AttentionBackend, Backend

_ATTENTION_BACKWARD = 2.5
"""Operations of a backward pass of attention relative to the forward pass: its kernels compute the scores again."""

SHORT = 256
"""Keys up to which attention has a lower rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """Counts of one forward and backward pass; all that says "per sample" grows with the micro-batch."""

    matmul: float
    """Operations of matrix products per sample."""
    convolution: float
    """Of convolutions per sample."""
    attention: float
    """Of attention per sample to more than ``SHORT`` keys, as its kernels compute it."""
    short_attention: float
    """Of attention per sample to fewer keys."""
    bytes: float
    """Bytes per sample that all other kernels of an eager pass read and write."""
    launches: int
    """Kernels that an eager pass launches."""
    saved: float
    """Bytes per sample that are alive when the forward pass ends: what is kept for the backward pass."""
    peaks: tuple[tuple[float, float], ...]
    """Moments of the pass at which most is alive: bytes per sample, and bytes of gradients of weights beside them."""

    def peak(self, micro: int, gradients: float = 1.0) -> float:
        """Return the most bytes that are alive at once with ``micro`` samples.

        Args:
            micro: samples of the micro-batch.
            gradients: share of the gradients of the weights that stays until the end of the pass.
        """
        return max(micro * alive + gradients * beside for alive, beside in self.peaks)


def trace(config: RunConfig, noisy: Tensor, condition: Condition, device: torch.device) -> Traced:
    """Run the network of a run forward and backward without data.

    Args:
        config: of the run.
        noisy: ``[B, C, H, W]``, only its shape counts; B at least 2, because one sample has other strides.
        condition: inputs of the network, as in a batch of B samples.
        device: of the run, which decides between kernels and references.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # its import takes a second

    performance = config.performance
    attention: AttentionBackend = "reference" if performance.attention == "reference" else "sdpa"
    network = dry_network(config, recompute=performance.recompute, attention=attention)
    with ExitStack() as stack:
        stack.enter_context(launch.recording())
        stack.enter_context(dispatch.forced(**_op_backends(config.performance, device)))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        weights = _cast_weights(network, DTYPES[performance.precision])
        _put(weights, network)
        inputs = (torch.empty(noisy.shape), torch.zeros(len(noisy)))
        counter: _Counter = stack.enter_context(_Counter(weights.values()))
        prediction = network(*inputs, **condition)
        saved = counter.alive
        outputs = tree_leaves(prediction)
        torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
        del outputs
        del prediction
        gradients = [weight.grad for weight in weights.values() if weight.grad is not None]
        return counter.result(len(noisy), saved, gradients)


def _op_backends(performance: PerformanceConfig, device: torch.device) -> dict[str, Backend]:
    """Return the backend of each op; a compiled reference saves about as much as the plain one."""
    default: Backend = "triton" if device.type == "cuda" and launch.triton is not None else "reference"
    chosen = dict.fromkeys(OPS, default) | performance.kernel_backends()
    return {op: "reference" if backend == "compile" else backend for op, backend in chosen.items()}


def _cast_weights(network: Model, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return parameters and buffers as they are in training; called in a ``FakeTensorMode``."""
    found: dict[str, Tensor] = {}
    for name, weight in network.named_parameters():
        found[name] = torch.empty(weight.shape, dtype=dtype, requires_grad=weight.requires_grad)
    for name, buffer in network.named_buffers():  # no engine casts them
        found[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return found


def _put(weights: Mapping[str, Tensor], network: nn.Module) -> None:
    """Replace the parameters and buffers of a network; unlike ``functional_call`` it also holds when blocks run again.

    ``weights`` must outlive the pass and get its gradients, so they are not copied.
    """
    for name, value in weights.items():
        parent, _, leaf = name.rpartition(".")
        module = network.get_submodule(parent)
        (module._buffers if leaf in module._buffers else module._parameters)[leaf] = value  # type: ignore[assignment]


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations inside it, and records when memory, but that of ``known``, is taken and given back."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = 0
        self._known = {_memory(value) for value in known}
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._events: list[tuple[int, int]] = []
        self._numbers: dict[int, int] = {}
        self._flops: defaultdict[str, float] = defaultdict(float)
        self._bytes = self._launches = self._taken = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and count it."""
        out = func(*args, **(kwargs or {}))
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        made = [value for value in tree_leaves(out) if isinstance(value, Tensor)]
        self._count(func, args, given, made, out)
        for value in made:
            self._take(value)
        return out

    def _count(self, func: Any, args: Sequence[Any], given: list[Tensor], made: list[Tensor], out: Any) -> None:
        name = func._overloadpacket.__name__
        before = {_memory(value) for value in given}
        moves = func._schema.is_mutable or any(_memory(value) not in before for value in made)
        if not moves or name.startswith(("empty", "new_empty")):
            return  # a view, or memory that nothing is written to
        self._launches += 1
        kind, flops = _operations(func, name, args, out)
        self._flops[kind] += flops
        if kind == "other":
            self._bytes += sum(value.numel() * value.element_size() for value in (*given, *made))

    def _take(self, value: Tensor) -> None:
        """Record the memory of a new tensor, and when it is given back."""
        storage, key = value.untyped_storage(), _memory(value)
        if key in self._known or key in self._refs:
            return
        size, number = storage.nbytes(), self._taken
        self._taken += 1
        self._numbers[key] = number
        self._events.append((number, size))
        self.alive += size

        def freed(_: Any) -> None:
            self._refs.pop(key, None)
            self._numbers.pop(key, None)
            self._events.append((number, -size))
            self.alive -= size

        self._refs[key] = weakref.ref(storage, freed)

    def result(self, samples: int, saved: int, gradients: Sequence[Tensor]) -> Traced:
        """Return the counts of a pass that left these gradients of the weights."""
        beside = {self._numbers[_memory(value)] for value in gradients if _memory(value) in self._numbers}
        return Traced(
            matmul=self._flops["matmul"] / samples,
            convolution=self._flops["convolution"] / samples,
            attention=self._flops["attention"] / samples,
            short_attention=self._flops["short_attention"] / samples,
            bytes=self._bytes / samples,
            launches=self._launches,
            saved=saved / samples,
            peaks=tuple((alive / samples, grown) for alive, grown in _largest(_totals(self._events, beside))),
        )


def _totals(events: Iterable[tuple[int, int]], beside: set[int]) -> Iterator[tuple[int, int]]:
    """Yield (bytes of activations, bytes of gradients of weights) after every event."""
    alive = grown = 0
    for number, size in events:
        if number in beside:
            grown += size
        else:
            alive += size
        yield alive, grown


def _largest(moments: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the moments than which no other has more of both."""
    found: list[tuple[int, int]] = []
    for alive, grown in sorted(set(moments), reverse=True):
        if not found or grown > found[-1][1]:
            found.append((alive, grown))
    return found


def _operations(func: Any, name: str, args: Sequence[Any], out: Any) -> tuple[str, float]:
    """Return the kind of a kernel, and its floating-point operations if it is a product."""
    if name.startswith("_scaled_dot_product"):
        backward = name.endswith("_backward")
        query, key = (args[1], args[2]) if backward else (args[0], args[1])
        forward = 4.0 * query.numel() * key.shape[-2]
        kind = "attention" if key.shape[-2] > SHORT else "short_attention"
        return kind, forward * (_ATTENTION_BACKWARD if backward else 1.0)
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return "other", 0.0
    return "convolution" if name.startswith("convolution") else "matmul", float(formula(*args, out_val=out))


def _memory(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)
