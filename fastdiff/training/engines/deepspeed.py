"""Engine of DeepSpeed and, with ``zero/``, all access to DeepSpeed's internals; no other file imports DeepSpeed."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION
from torch import Tensor, nn

from fastdiff.batch import Output
from fastdiff.config.deepspeed import DsConfig, with_sums, with_sums_in_parts, zero_stage
from fastdiff.config.engine import require_loss_scale
from fastdiff.config.optimizers.registry import family_of
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.config.sections.objective import ObjectiveConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.console import without_prints
from fastdiff.errors import ConfigError, DivergedError
from fastdiff.models.cost.memory import buffer_bytes, frozen_bytes
from fastdiff.models.kernel_choice import DTYPES
from fastdiff.models.matrices import matrices_of
from fastdiff.parallel.fragments import Flat, Fragment, Shapes, copy_into
from fastdiff.parallel.world import World
from fastdiff.training.engines.base import Engine
from fastdiff.training.optimizer.build import (
    base_lr,
    build_lr_schedule,
    build_optimizer,
    create_state,
    forget,
    set_lr,
    set_lr_step,
)
from fastdiff.training.zero.norm import take_norm_at_once
from fastdiff.training.zero.ordered_shards import OrderedShards
from fastdiff.training.zero.refusals import refusals
from fastdiff.training.zero.shortcuts import keep_whole, leave_gradients_in_place, leave_parameters_in_place
from fastdiff.training.zero.slices import flats_of, overwrite
from fastdiff.training.zero.stage3 import partition, plan_two_passes_as_one, require_input_gradients
from fastdiff.training.zero.sums import collect_in_fp32, drop_sums_of_skipped_steps

# On a CPU DeepSpeed would compile an all-reduce for inference, which no training calls: a minute of the first start, a
# lock that a killed build leaves, and 66 MiB of shared memory per rank.
import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]

# DeepSpeed asks whether the optimizer is its own Muon, whose file passes three functions to torch.compile. That imports
# torch's compiler, which takes 1.6 s and may be needed by nothing else. Imported with a decorator that does nothing,
# they stay uncompiled.
_compiler = import_module("deepspeed.runtime.compiler")
_compile, _compiler.compile = _compiler.compile, lambda: _compiler.dummy_decorator  # type: ignore[attr-defined]
import_module("deepspeed.runtime.zero.muon.original_muon")
_compiler.compile = _compile  # type: ignore[attr-defined]

# For bf16 weights with fp32 sums of gradients DeepSpeed has a second optimizer, at stage 1 alone. That of the other
# stages does the same there.
_choose_wrapper = deepspeed.DeepSpeedEngine._do_optimizer_sanity_check


def _always_zero(engine: Any, optimizer: Any) -> Any:
    chosen = _choose_wrapper(engine, optimizer)
    return ZERO_OPTIMIZATION if engine.zero_optimization() else chosen


deepspeed.DeepSpeedEngine._do_optimizer_sanity_check = _always_zero  # type: ignore[method-assign]

_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class DeepSpeedEngine(Engine):
    """A model with its optimizer under DeepSpeed.

    Args:
        model: on any device, fp32 weights; the engine moves and casts it. Under ZeRO-3 it may be on ``meta``: then its
            weights are zeros until ``fill``, and no rank ever holds all of them.
        config: the run.
        ds_config: the resolved DeepSpeed JSON (``config.deepspeed.resolve``).
        world: the ranks.
        blocks: module classes that ZeRO-3 gathers as one unit, so that a block can be compiled whole.

    Raises:
        ConfigError: this device cannot compute in ``config.performance.precision``, or the optimizer keeps its
            state in more bits than its family declares.
    """

    kind = "deepspeed"

    def __init__(
        self, model: nn.Module, config: RunConfig, ds_config: DsConfig, world: World, blocks: Iterable[type[nn.Module]]
    ) -> None:
        if world.device.type == "cpu" and get_accelerator().device_name() != "cpu":
            set_accelerator(CPU_Accelerator())  # DeepSpeed would train on the GPU that --performance.device cpu leaves
        self.stage, self.ds_config = zero_stage(ds_config), ds_config
        self.frozen_bytes = frozen_bytes(model, config.performance.precision)
        self.buffer_bytes = buffer_bytes(model)
        self._precision = precision = config.performance.precision
        _check_precision(precision, self.stage)
        self.shapes: Shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
        self.matrices = matrices_of(config, self.shapes)
        guard, on_meta = self.stage == 0 and precision == "fp32", any(p.is_meta for p in model.parameters())
        if on_meta:
            partition(model, ds_config, DTYPES[precision], world.device)
        if self.stage == 3:
            _gather_whole(model, tuple(blocks))
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        multipliers = map(config.model.lr_multiplier, trained)
        in_order = config.performance.in_order
        optimizer = build_optimizer(
            trained.values(), config.optim, skip_non_finite=guard, multipliers=multipliers, in_order=in_order
        )
        names = {id(p): name for name, p in model.named_parameters()}
        # DeepSpeed makes its fp32 masters from the cast weights; these are the weights before rounding.
        rounded = precision != "fp32" and not on_meta
        exact = {name: p.detach() for name, p in trained.items() if rounded}
        # Some of DeepSpeed's wrappers create the state by a step with zero gradients. At learning rate 0 it moves
        # nothing, and its state is cleared below.
        set_lr(optimizer, 0.0)
        wide = _adds_up(config.batch, config.performance, world.size)
        given = with_sums(with_sums_in_parts(ds_config) if in_order else ds_config, wide=wide)
        given |= {"gradient_clipping": 0.0} if guard else {}
        with without_prints(), refusals():  # of every rank
            self._engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=given)
        if guard:
            # DeepSpeed would search all modules for parameters; frozen ones have no gradient.
            self._engine.zero_grad = optimizer.zero_grad
        if guard and world.size == 1:
            # A single rank would join all gradients, send them to itself and copy them back. (In bf16 it then sends a
            # flag.)
            self._engine.enable_backward_allreduce = False
        if self.stage == 0 and wide:
            collect_in_fp32(self._engine)
        optimizer.state.clear()
        set_lr(optimizer, config.optim.lr)
        self.optimizer = optimizer
        self.flats: list[Flat] = list(flats_of(self._engine, optimizer, names, world))
        self._summands = world.size * config.batch.accumulation(world.size)
        self._ordered = self._order_sums(trained, config, world) if in_order else None
        if self.stage > 0:
            _slim(self._engine, self.stage, config.objective, self._ordered)
        for name, value in exact.items():  # the cast copies are already their roundings
            copy_into(self.flats, name, value)
        family = family_of(config.optim)
        world.on_all_ranks(lambda: create_state(optimizer, family, self.flats, self.shapes, self.matrices, world))
        self._schedule = build_lr_schedule(optimizer, config.optim, config.steps)
        self._rank, self._device = world.rank, world.device
        self._first_scale = self.loss_scale
        self._discarding, self.lr = False, 0.0

    def _order_sums(self, trained: dict[str, nn.Parameter], config: RunConfig, world: World) -> OrderedShards:
        performance = config.performance
        dtype = DTYPES[performance.sums if self._summands > 1 else performance.precision]
        bucket = self._engine.zero_reduce_bucket_size()
        return OrderedShards(self._engine.optimizer, trained, self.shapes, self.flats, dtype, bucket, world)

    @property
    def module(self) -> nn.Module:
        """The network."""
        return self._engine.module  # type: ignore[no-any-return]

    def __call__(self, *inputs: Tensor, **condition: Tensor) -> Output:
        """Run the model's forward pass."""
        return self._engine(*inputs, **condition)  # type: ignore[no-any-return]

    def averaged_ranks(self, world: World) -> int:
        """Return the number of ranks, whose gradients DeepSpeed averages; in one order they are added up."""
        return world.size if self._ordered is None else 1

    def named_calls(self) -> dict[str, list[tuple[object, str]]]:
        """Return hooks and reductions of DeepSpeed."""
        return _named_calls(self._engine) if self._ordered is None else {"reduce": [(self._ordered, "reduce")]}

    def rehearse(self, loss: Callable[[], Tensor], *, accumulates: bool) -> None:
        """Take a step that changes nothing, without DeepSpeed's warning of an overflow, which it is not."""
        level = deepspeed.utils.logger.level
        deepspeed.utils.logger.setLevel(logging.CRITICAL)
        try:
            super().rehearse(loss, accumulates=accumulates)
        finally:
            deepspeed.utils.logger.setLevel(level)

    def begin_last_micro_batch(self) -> None:
        """Make the next micro-batch the last of its step: the one behind is the first of the next."""
        self._engine.micro_steps = -1

    def backward(self, loss: Tensor, *, discard: bool = False) -> None:
        """Add the gradient of ``loss``, divided by the accumulation."""
        self._discarding = discard
        loss = loss * math.nan if discard else loss
        if self._ordered is None:
            self._engine.backward(loss)
        else:
            self._engine.backward(loss * (1.0 / self._summands), scale_wrt_gas=False)
            self._ordered.end_micro_batch()
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()  # only counts the micro-batch

    def check_grads(self) -> None:
        """DeepSpeed reads the norm of the gradient in ``optimizer_step``."""

    def optimizer_step(self) -> None:
        """Take the optimizer step; see ``Engine.optimizer_step``."""
        self.lr = base_lr(self.optimizer)
        if self._ordered is not None:
            self._ordered.hand_over()
        scale = self._lift_loss_scale() if self._discarding else {}
        try:
            self._engine.step()
        except Exception as error:
            if "already at minimum" not in str(error):
                raise
            raise DivergedError(
                "the gradient overflows fp16 at the smallest loss scale; lower --optim.lr or use "
                "--performance.precision bf16. The same command resumes from the newest checkpoint, if there is one"
            ) from error
        self._set_loss_scale(scale)

    def finish_step(self, *, skipped: bool) -> bool:
        """Set the learning rate of the next step; return False if the step changed nothing."""
        applied = bool(self._engine.was_step_applied()) and not getattr(self._engine.optimizer, "overflow", False)
        if applied:
            self._schedule.step()
        return applied

    def grad_norm(self) -> Tensor | float | None:
        """Return the norm of the last gradient before clipping, left on its device; None before the first step."""
        return self._engine.get_global_grad_norm()  # type: ignore[no-any-return]

    @property
    def loss_scale(self) -> dict[str, float]:
        """State of the dynamic fp16 loss scale; empty in other precisions."""
        if self._precision != "fp16":
            return {}
        scaler = self._engine.optimizer.loss_scaler
        return {name: getattr(scaler, name) for name in _SCALER_FIELDS if hasattr(scaler, name)}

    def restore(self, applied: int, loss_scale: dict[str, float]) -> None:
        """Restore the learning rate and, under fp16, the loss scale after ``applied`` steps."""
        set_lr_step(self._schedule, applied)
        self._set_loss_scale({**self._first_scale, **loss_scale} if self._precision == "fp16" else {})

    @torch.no_grad()
    def return_to(self, read: Callable[[Fragment], Tensor]) -> None:
        """Load the weights of a checkpoint between two steps, and reset the optimizer state in place."""
        for name, parameter in self._engine.module.named_parameters():
            if parameter.requires_grad:
                overwrite(parameter, name, self._rank, read)
        self._forget_copies()
        for flat in self.flats:
            forget(flat.state)

    @torch.no_grad()
    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Set the weights of a network that came on ``meta``."""
        module = self._engine.module
        parameters = dict(module.named_parameters())
        for name, value in weights:
            if name not in parameters:
                parent, _, leaf = name.rpartition(".")
                module.get_submodule(parent)._buffers[leaf] = value.to(self._device)
                continue
            overwrite(parameters[name], name, self._rank, partial(Fragment.within, value=value))
            copy_into(self.flats, name, value)
        self._forget_copies()

    def _forget_copies(self) -> None:
        """Let the next pass of ZeRO-3 gather the weights anew that ``zero_hpz_partition_size`` keeps in a node."""
        if self.stage == 3:
            self._engine.optimizer.invalidate_secondary_tensor()

    def _lift_loss_scale(self) -> dict[str, float]:
        """Double the loss scale and return its previous state for ``step``: a discarded step is not an overflow."""
        before = self.loss_scale
        self._set_loss_scale({"cur_scale": 2.0 * before["cur_scale"]} if before else {})
        return before

    def _set_loss_scale(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            setattr(self._engine.optimizer.loss_scaler, name, value)


def _adds_up(batch: BatchConfig, performance: PerformanceConfig, ranks: int) -> bool:
    """Return whether a step adds up several gradients, in another dtype than their own."""
    return performance.precision != performance.sums and ranks * batch.accumulation(ranks) > 1


def _check_precision(precision: str, stage: int) -> None:
    require_loss_scale(precision, stage)
    if precision == "fp16" and not get_accelerator().is_fp16_supported():
        raise ConfigError("--performance.precision fp16: this device has no fp16 arithmetic; use bf16 or fp32")


def _slim(engine: Any, stage: int, objective: ObjectiveConfig, ordered: OrderedShards | None) -> None:
    """Leave out work and memory of ZeRO-1 to 3 that a step does not need."""
    take_norm_at_once(engine.optimizer, None if ordered is None else ordered.norm)
    if stage in (1, 2):
        drop_sums_of_skipped_steps(engine.optimizer)
    if stage == 3 and ordered is None:
        leave_gradients_in_place(engine.optimizer)
    if stage == 3:
        leave_parameters_in_place(engine.optimizer)
    if stage == 3 and objective.takes_two_passes:
        plan_two_passes_as_one(engine)
    if stage == 3:
        keep_whole(engine.optimizer)


def _gather_whole(model: nn.Module, blocks: tuple[type[nn.Module], ...]) -> None:
    """Let ZeRO-3 gather each block at once."""
    if blocks:
        deepspeed.utils.set_z3_leaf_modules(model, list(blocks))
    require_input_gradients(model, blocks)


_HOOKS = ("process_gradients", "reduce_ready_partitions_and_remove_grads")
"""Called once per parameter whose gradient is complete; stages 1 and 2 have both, the second within the first."""
_REDUCTIONS = ("reduce_ipg_grads", "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads")
"""Reductions of a full bucket, of stages 1 and 2, and of stage 3."""


def _named_calls(engine: Any) -> dict[str, list[tuple[object, str]]]:
    """Return (object, method) by the name of the range: ``hooks`` or ``reduce``."""
    optimizer = engine.optimizer
    hooks = [name for name in _HOOKS if hasattr(optimizer, name)][:1]
    reductions: list[tuple[object, str]] = [(optimizer, name) for name in _REDUCTIONS if hasattr(optimizer, name)]
    # Whatever is left at the end of the backward pass; at stage 0, all.
    return {"hooks": [(optimizer, name) for name in hooks], "reduce": [*reductions, (engine, "allreduce_gradients")]}
