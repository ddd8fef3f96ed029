"""A forward and backward pass that is run without data: its operations, the bytes it moves, and those it holds at once.

Every tensor is fake: it has a shape, a dtype and a lifetime, but no memory. What lives at the same time is therefore
what lives at the same time in eager execution, with the workspaces of libraries left out.
"""

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
    recomputed: float
    """Share of the operations of the forward pass that run again in the backward pass."""
    saved: float
    """Bytes per sample that are alive when the forward pass ends: what is kept for the backward pass."""
    saved_again: float
    """Bytes per sample that blocks save when they run again, added up."""
    peaks: tuple[tuple[float, float], ...]
    """Moments of the pass at which most is alive: bytes per sample, and bytes of gradients of weights beside them."""

    def peak(self, micro: int, gradients: float = 1.0) -> float:
        """Return the most bytes that are alive at once with ``micro`` samples.

        Args:
            micro: samples of the micro-batch.
            gradients: share of the gradients of the weights that stays until the end of the pass.
        """
        return max(micro * alive + gradients * beside for alive, beside in self.peaks)

    def joined(self, other: "Traced", share: float) -> "Traced":
        """Return the mean counts of a training of two kinds of passes, with the peaks of both.

        Args:
            other: a pass of the other kind.
            share: of the other kind in the training.
        """
        kinds = (
            "matmul", "convolution", "attention", "short_attention", "bytes", "recomputed", "saved", "saved_again",
            "launches",
        )  # fmt: skip
        mean = {kind: (1.0 - share) * getattr(self, kind) + share * getattr(other, kind) for kind in kinds}
        return Traced(**mean | {"launches": round(mean["launches"])}, peaks=(*self.peaks, *other.peaks))


@dataclass(frozen=True, slots=True)
class Section:
    """Part of a pass, which begins with the forward or backward pass of a block; that of the last block has both."""

    block: int
    """Number of the block in their order; -1: the first part, before any block."""
    alive: int
    """Bytes that are alive at its beginning, without gradients of weights."""
    moments: tuple[tuple[int, int], ...]
    """Those at which most is alive: bytes, and bytes of gradients of weights beside them."""
    counts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Recording:
    """A pass in sections."""

    samples: int
    saved: int
    """Bytes that are alive when the forward pass ends."""
    sections: tuple[Section, ...]

    def storing(self, stored: "Recording", first: int) -> "Recording":
        """Return the pass whose blocks from number ``first`` on keep their activations.

        Until the first of them begins, and after its backward pass, the pass is this one. Between, it is the other one
        without what the blocks before keep in excess there.

        Args:
            stored: the pass whose blocks all keep their activations; this one recomputes all.
            first: number of the first block that keeps them.
        """
        inner = [section for section in stored.sections if section.block >= first]
        if not inner:
            return self
        here = next(section.alive for section in self.sections if section.block == inner[0].block)
        excess = inner[0].alive - here
        before, after = _around(self.sections, first)
        moved = (
            replace(each, alive=each.alive - excess, moments=tuple((a - excess, g) for a, g in each.moments))
            for each in inner
        )
        return Recording(self.samples, stored.saved - excess, (*before, *moved, *after))

    def traced(self) -> Traced:
        """Return the counts of the whole pass."""
        counts: Counter[str] = Counter()
        for section in self.sections:
            counts.update(section.counts)
        kinds = ("matmul", "convolution", "attention", "short_attention", "bytes", "saved_again")
        moments = _largest(moment for section in self.sections for moment in section.moments)
        return Traced(
            **{kind: counts[kind] / self.samples for kind in kinds},  # type: ignore[arg-type]
            launches=int(counts["launches"]),
            recomputed=counts["again"] / counts["forward"] if counts["forward"] else 0.0,
            saved=self.saved / self.samples,
            peaks=tuple((alive / self.samples, grown) for alive, grown in moments),
        )


def _around(sections: Sequence[Section], first: int) -> tuple[list[Section], list[Section]]:
    """Return the sections of the blocks before ``first``: of their forward passes, and of their backward passes."""
    inner = [place for place, section in enumerate(sections) if section.block >= first]
    return list(sections[: inner[0]]), list(sections[inner[-1] + 1 :])


def trace(config: RunConfig, noisy: Tensor, condition: Condition, device: torch.device) -> Traced:
    """Run the network of a run forward and backward without data; with arguments as ``record``."""
    return record(config, noisy, condition, device).traced()


def record(config: RunConfig, noisy: Tensor, condition: Condition, device: torch.device) -> Recording:
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
    network.store_blocks(performance.stored_blocks)
    with ExitStack() as stack:
        stack.enter_context(launch.recording())
        stack.enter_context(dispatch.forced(**_op_backends(config.performance, device)))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        weights = _cast_weights(network, DTYPES[performance.precision])
        _put(weights, network)
        inputs = (torch.empty(noisy.shape), torch.zeros(len(noisy)))
        counter: _Counter = stack.enter_context(_Counter(weights.values()))
        for number, block in enumerate(network.blocks_in_order()):
            counter.watch(number, block)
        prediction = network(*inputs, **condition)
        saved = counter.alive
        outputs = [part for part in tree_leaves(prediction) if part is not None]
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
        self._taken = 0
        self._begun: list[tuple[int, int]] = []
        """Block of each section, and the number of events before it."""
        self._counts: list[defaultdict[str, float]] = []
        """Of each section."""
        self._begin(-1)
        self._runs_again = False
        self._before_again: int | None = None
        """Bytes alive before a block ran again, until the backward pass goes on."""

    def watch(self, number: int, block: nn.Module) -> None:
        """Let sections begin with the passes of a block."""

        def enter(*_: Any) -> None:
            if _in_backward():
                self._runs_again, self._before_again = True, self.alive
            elif number > self._begun[-1][0]:
                self._begin(number)

        def leave(_: Any, __: Any, result: Any) -> None:
            self._runs_again = False
            if not _in_backward():
                for value in tree_leaves(result):
                    if isinstance(value, Tensor) and value.requires_grad:
                        value.register_hook(enter_backward)  # type: ignore[no-untyped-call]

        def enter_backward(_: Tensor) -> None:  # with the first output whose gradient is complete
            if number < self._begun[-1][0]:
                self._begin(number)

        block.register_forward_pre_hook(enter)
        # Recomputation ends a forward by an exception, as soon as it has what the backward pass needs.
        block.register_forward_hook(leave, always_call=True)

    def _begin(self, block: int) -> None:
        self._begun.append((block, len(self._events)))
        self._counts.append(defaultdict(float))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and count it."""
        if self._before_again is not None and not self._runs_again:
            self._counts[-1]["saved_again"] += self.alive - self._before_again
            self._before_again = None
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
        counts = self._counts[-1]
        counts["launches"] += 1
        kind, flops = _operations(func, name, args, out)
        if kind == "other":
            counts["bytes"] += sum(value.numel() * value.element_size() for value in (*given, *made))
            return
        counts[kind] += flops
        if self._runs_again:
            counts["again"] += flops
        elif not _in_backward():
            counts["forward"] += flops

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

    def result(self, samples: int, saved: int, gradients: Sequence[Tensor]) -> Recording:
        """Return the pass that left these gradients of the weights."""
        beside = {self._numbers[_memory(value)] for value in gradients if _memory(value) in self._numbers}
        totals = [(0, 0), *_totals(self._events, beside)]
        ends = [start for _, start in self._begun[1:]] + [len(self._events)]
        return Recording(
            samples,
            saved,
            tuple(
                Section(block, totals[start][0], tuple(_largest(totals[start : end + 1])), counts)
                for (block, start), end, counts in zip(self._begun, ends, self._counts, strict=True)
            ),
        )


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


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
