"""The place of a rank within the collectives of a micro-batch, and how it gets to their end after a lack of memory.

ZeRO-3 gathers parameters in the forward and in the backward pass, and stages 1 to 3 reduce gradients in the latter. All
ranks begin the same collectives in the same order, which does not depend on the number of samples. A rank that runs out
of memory has begun the first n of them. It forgets what its pass has left, which brings DeepSpeed back to the state at
the begin of the micro-batch, and repeats the pass on fewer samples: the first n collectives are answered without the
other ranks, those behind take place. The other ranks meet all collectives that they expect, and no other. Gathered
weights and gradients of such a pass are worthless, which is why the step is void.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from deepspeed.comm import comm
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

_COLLECTIVES = (
    "all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor", "broadcast",
    "all_gather", "all_gather_into_tensor", "all_gather_coalesced", "all_to_all_single",
)  # fmt: skip
"""Methods of DeepSpeed's backend in a micro-batch; none calls another."""
_TRACE = ("trace_mode", "submodule_order", "param_order", "step_id_module_fetched_for")
"""What the coordinator of ZeRO-3 knows of the order of the modules."""


class Collectives:
    """The collectives of this process that go through DeepSpeed, counted."""

    def __init__(self, backend: Any) -> None:
        self.begun: list[Tensor | None] = []
        """Those since the last clear; the result of a broadcast, which ZeRO-3 compares its order with."""
        self._answers: deque[Tensor | None] = deque()
        for name in _COLLECTIVES:
            setattr(backend, name, self._counted(name, getattr(backend, name)))

    @classmethod
    def of(cls, backend: Any) -> Collectives:
        """Return those of a backend, which DeepSpeed has one of."""
        if not hasattr(backend, "fastdiff_collectives"):
            backend.fastdiff_collectives = cls(backend)
        found: Collectives = backend.fastdiff_collectives
        return found

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Inside, the collectives that have begun are answered without the other ranks."""
        self._answers = deque(self.begun)
        try:
            yield
        finally:
            self._answers.clear()

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def counted(*arguments: Any, **options: Any) -> Any:
            if self._answers:
                if (answer := self._answers.popleft()) is not None:
                    options.get("tensor", *arguments[:1]).copy_(answer)
                return _Done()
            done = call(*arguments, **options)
            self.begun.append(options.get("tensor", *arguments[:1]).clone() if name == "broadcast" else None)
            return done

        return counted


class _Done:
    """A collective that is complete."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Place:
    """The place of this rank within a micro-batch.

    Args:
        engine: of DeepSpeed.
        ranks: number of ranks.
    """

    def __init__(self, engine: Any, ranks: int) -> None:
        self._engine, self._within = engine, False
        self._collectives = Collectives.of(comm.cdb) if ranks > 1 else None
        offload = getattr(engine.optimizer, "parameter_offload", None)
        self._gathering = None if offload is None else _Gathering(offload)

    def begin(self) -> None:
        """Begin a micro-batch, unless this is its second forward pass."""
        if self._within:
            return
        self._within = True
        if self._collectives is not None:
            self._collectives.begun.clear()
        if self._gathering is not None:
            self._gathering.note()

    def end(self) -> None:
        """End a micro-batch."""
        self._within = False

    @contextmanager
    def catching_up(self) -> Iterator[None]:
        """Return to the begin of the micro-batch; inside, collectives that have begun are answered at once."""
        self.begin()
        _forget_gradients(self._engine)
        if self._gathering is not None:
            self._gathering.reset()
        if self._collectives is None:
            yield
        else:
            with self._collectives.answered():
                yield


def _forget_gradients(engine: Any) -> None:
    """Drop the gradients of an interrupted backward pass, and bring the hooks and buckets to its begin."""
    optimizer = engine.optimizer
    for parameter in engine.module.parameters():
        parameter.grad = parameter.grad_accum = None
    if (hooks := getattr(optimizer, "_backward_hook_state", None)) is None:
        return
    hooks.reset_for_new_step()
    hooks.backward_active_depth = hooks.remaining_grad_acc_hooks = 0
    for bucket in optimizer.ipg_buckets.values():
        bucket.params.clear()
        bucket.elements = 0
    reduced = optimizer.params_already_reduced
    for key in reduced if isinstance(reduced, dict) else range(len(reduced)):
        reduced[key] = False
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        for bucket in optimizer.ipg_buckets.values():
            bucket.clear()
        optimizer.extra_large_param_to_reduce.clear()
        optimizer._clear_previous_reduced_grads()
        optimizer._release_ipg_buffers()


class _Gathering:
    """The parameters of ZeRO-3 that are gathered at the begin of a micro-batch, and what is known of their order.

    Args:
        offload: DeepSpeed's owner of the parameters.
    """

    def __init__(self, offload: Any) -> None:
        self._offload, self._coordinator = offload, offload.get_param_coordinator()
        self.note()

    def note(self) -> None:
        """Note the state at the begin of a micro-batch."""
        self._kept = [p for p in self._offload.persistent_parameters if p.ds_status is ZeroParamStatus.AVAILABLE]
        self._stack = len(parameter_offload.FWD_MODULE_STACK)
        mode, modules, parameters, steps = (getattr(self._coordinator, _private(name)) for name in _TRACE)
        # Once complete they are tuples; a pass that records appends to the list.
        modules = modules if isinstance(modules, tuple) else list(modules)
        self._trace = mode, modules, parameters, {key: deque(found) for key, found in steps.items()}

    def reset(self) -> None:
        """Return to that state; wait for what is being gathered."""
        coordinator, module = self._coordinator, self._offload.module
        del parameter_offload.FWD_MODULE_STACK[self._stack :]
        for each in module.modules():
            each._parameters._in_forward = False
            each.__dict__.pop("applied_pre_backward_ref_cnt", None)
            if hasattr(each, "ds_recompute_parameters"):
                each.ds_recompute_parameters.clear()
        self._offload.is_second_pass = False
        getattr(coordinator, _private("active_backward_submodules")).clear()
        parameters = list(module.parameters())
        for parameter in parameters:
            parameter.ds_active_sub_modules.clear()
        coordinator._clean_inflight_param_registry()
        kept = {id(parameter) for parameter in self._kept}
        for parameter in parameters:
            if parameter.ds_status is ZeroParamStatus.INFLIGHT:  # its gathering has not begun
                parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
            elif parameter.ds_status is ZeroParamStatus.AVAILABLE and id(parameter) not in kept:
                parameter.partition()
        *known, steps = self._trace
        for name, value in zip(_TRACE, (*known, defaultdict(deque, steps)), strict=True):
            setattr(coordinator, _private(name), value)


def _private(name: str) -> str:
    return f"_PartitionedParameterCoordinator__{name}"
