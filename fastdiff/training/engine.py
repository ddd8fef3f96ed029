"""DeepSpeed engine and all access to DeepSpeed's internals; the only file that imports DeepSpeed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from itertools import accumulate
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from fastdiff.config.deepspeed import DsConfig, zero_stage
from fastdiff.config.run import RunConfig
from fastdiff.console import without_prints
from fastdiff.errors import ConfigError, DivergedError
from fastdiff.parallel.fragments import Flat, Fragment, Shapes
from fastdiff.parallel.world import World
from fastdiff.training.optim import build_lr_schedule, build_optimizer, create_8bit_state, forget, set_lr_step

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

_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class Engine:
    """A model with its optimizer under DeepSpeed.

    Args:
        model: on any device, fp32 weights; the engine moves and casts it.
        config: the run.
        ds_config: the resolved DeepSpeed JSON (``config.deepspeed.resolve``).
        world: the ranks.
        blocks: module classes that ZeRO-3 gathers as one unit, so that a block can be compiled whole.

    Raises:
        ConfigError: this device cannot compute in ``config.performance.precision``, or an 8-bit optimizer keeps its
            moments in more than 8 bits.
    """

    def __init__(
        self,
        model: nn.Module,
        config: RunConfig,
        ds_config: DsConfig,
        world: World,
        blocks: Iterable[type[nn.Module]],
    ) -> None:
        self.stage = zero_stage(ds_config)
        self._precision = precision = config.performance.precision
        if precision == "fp16" and self.stage == 0:
            raise ConfigError(
                "--performance.precision fp16 with ZeRO stage 0: DeepSpeed does not scale the loss there; "
                "use deepspeed_configs/zero1.json, or --performance.precision bf16"
            )
        if precision == "fp16" and not get_accelerator().is_fp16_supported():
            raise ConfigError("--performance.precision fp16: this device has no fp16 arithmetic; use bf16 or fp32")
        self.shapes: Shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
        guard = self.stage == 0 and precision == "fp32"
        if self.stage == 3:
            deepspeed.utils.set_z3_leaf_modules(model, list(blocks))
            _require_input_gradients(model, tuple(blocks))
        optimizer = build_optimizer(
            (p for p in model.parameters() if p.requires_grad), config.optim, skip_non_finite=guard
        )
        names = {id(p): name for name, p in model.named_parameters()}
        # DeepSpeed makes its fp32 masters from the cast weights; these are the weights before rounding.
        exact = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad and precision != "fp32"}
        # Some of DeepSpeed's wrappers create the state by a step with zero gradients. At learning rate 0 it moves
        # nothing, and its state is cleared below.
        _set_lr(optimizer, 0.0)
        ds_config = {**ds_config, **({"gradient_clipping": 0.0} if guard else {})}
        with without_prints():  # of every rank
            self._engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config)
        if guard:
            # DeepSpeed would search all modules for parameters; frozen ones have no gradient.
            self._engine.zero_grad = optimizer.zero_grad
        if guard and world.size == 1:
            # A single rank would join all gradients, send them to itself and copy them back. (In bf16 it then sends a
            # flag.)
            self._engine.enable_backward_allreduce = False
        if self.stage == 3 and config.objective.takes_two_passes:
            _plan_two_passes_as_one(self._engine)
        optimizer.state.clear()
        _set_lr(optimizer, config.optim.lr)
        self.optimizer = optimizer
        self.flats: list[Flat] = list(_flats(self._engine, optimizer, names, world))
        _set_masters(self.flats, exact)
        world.together(lambda: create_8bit_state(optimizer, config.optim.name, self.flats, world))
        self._schedule = build_lr_schedule(optimizer, config.optim, config.steps)
        self._rank = world.rank
        self._first_scale = self.loss_scale
        self._discarding = False
        self.lr = 0.0
        """Learning rate of the last step."""

    def __call__(self, *inputs: Tensor, **condition: Tensor) -> Tensor:
        """Run the model's forward pass."""
        return self._engine(*inputs, **condition)  # type: ignore[no-any-return]

    def backward(self, loss: Tensor, *, discard: bool = False) -> None:
        """Add the gradient of ``loss`` (scalar, mean over the micro-batch), divided by the accumulation.

        Args:
            loss: of this rank.
            discard: make ``step`` skip the step as if its gradient were not finite, whatever earlier micro-batches
                gave; equal on all ranks.
        """
        self._discarding = discard
        self._engine.backward(loss * math.nan if discard else loss)
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()  # only counts the micro-batch

    def step(self) -> bool:
        """Take the optimizer step; return False and change nothing if a gradient is not finite on any rank.

        Raises:
            DivergedError: under fp16, when the loss scale is at its minimum and the gradient still overflows.
        """
        self.lr = float(self.optimizer.param_groups[0]["lr"])
        scale = self._lift_loss_scale() if self._discarding else {}
        try:
            self._engine.step()
        except Exception as error:
            if "already at minimum" not in str(error):
                raise
            raise DivergedError(
                "the gradient overflows fp16 at the smallest loss scale; lower --optim.lr or use "
                "--performance.precision bf16. The checkpoints before are intact"
            ) from error
        self._set_loss_scale(scale)
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
        """Load the weights of a checkpoint between two steps, as if the engine were built with them.

        The optimizer state is reset in place to that before the first step; ``checkpoints.restore`` sets the masters,
        as after a start.

        Args:
            read: returns a fragment of the weights, ``[numel]`` fp32 on the CPU.
        """
        for name, parameter in self._engine.module.named_parameters():
            if parameter.requires_grad:
                _overwrite(parameter, name, self._rank, read)
        for flat in self.flats:
            forget(flat.state)

    def _lift_loss_scale(self) -> dict[str, float]:
        """Double the loss scale and return its previous state for ``step``: a discarded step is not an overflow."""
        before = self.loss_scale
        self._set_loss_scale({"cur_scale": 2.0 * before["cur_scale"]} if before else {})
        return before

    def _set_loss_scale(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            setattr(self._engine.optimizer.loss_scaler, name, value)


def _require_input_gradients(model: nn.Module, blocks: tuple[type[nn.Module], ...]) -> None:
    """Give a block that follows only frozen parameters (LoRA) an input with a gradient.

    ZeRO-3 reduces the gradients of a leaf module once the gradients of its inputs exist. If no input has one, it does
    so before the backward pass of the module, and the gradients are lost.
    """
    for module in model.modules():
        if isinstance(module, blocks) and any(p.requires_grad for p in module.parameters()):
            module.register_forward_pre_hook(_require_input_gradient)


def _require_input_gradient(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    if not torch.is_grad_enabled() or any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        return None
    return (inputs[0].detach().requires_grad_(), *inputs[1:])


def _plan_two_passes_as_one(engine: Any) -> None:
    """Make ZeRO-3 treat a forward pass without a gradient and the following one with a gradient as one step.

    It prefetches parameters in the module order of the previous step, and assumes that every forward pass starts a
    step. Two alternating orders would be recorded, compared between all ranks and discarded in every step.
    """
    offload = engine.optimizer.parameter_offload
    offload.fwd_pre_hook.remove()
    is_second = False

    def start(*_: Any) -> None:
        nonlocal is_second
        if not is_second:
            offload.get_param_coordinator().reset_step()
        is_second = not torch.is_grad_enabled()

    # Before the hooks that gather, like the hook that it replaces.
    offload.fwd_pre_hook = engine.module.register_forward_pre_hook(start, prepend=True)


def _set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
        group.pop("initial_lr", None)


def _set_masters(flats: Iterable[Flat], weights: Mapping[str, Tensor]) -> None:
    """Copy the given fp32 parameters into the masters; the cast copies are already their roundings."""
    for flat in flats:
        for fragment in flat.fragments:
            if fragment.name in weights:
                values = weights[fragment.name].flatten()[fragment.start : fragment.start + fragment.numel]
                fragment.of(flat.master).copy_(values)


def _overwrite(parameter: Any, name: str, rank: int, read: Callable[[Fragment], Tensor]) -> None:
    """Copy fp32 weights into the working copy of a parameter, rounded as a step rounds them."""
    if hasattr(parameter, "ds_tensor"):
        for own in _stage3_fragments([parameter], {id(parameter): name}, rank):
            parameter.ds_tensor[: own.numel].copy_(read(own))
        if parameter.ds_status is not ZeroParamStatus.AVAILABLE:
            return
    parameter.copy_(read(Fragment(name, 0, parameter.numel(), 0)).view(parameter.shape))


def _flats(engine: Any, optimizer: torch.optim.Optimizer, names: dict[int, str], world: World) -> Iterator[Flat]:
    """Yield this rank's flat fp32 tensors, for each of DeepSpeed's optimizer wrappers."""
    wrapper = engine.optimizer
    if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        for key, parameters in zip(wrapper.fp32_partitioned_groups_flat, wrapper.fp16_groups, strict=True):
            yield Flat(key, optimizer.state, tuple(_stage3_fragments(parameters, names, world.rank)), owned=True)
    elif isinstance(wrapper, DeepSpeedZeroOptimizer):
        for key, parameters in zip(wrapper.single_partition_of_fp32_groups, wrapper.bit16_groups, strict=True):
            yield Flat(key, optimizer.state, tuple(_stage12_fragments(parameters, names)), owned=True)
    elif isinstance(wrapper, FP16_UnfusedOptimizer):
        pairs = [
            (key, names[id(parameter)])
            for keys, parameters in zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True)
            for key, parameter in zip(keys, parameters, strict=True)
        ]
        yield from _whole_parameters(pairs, optimizer, world)
    elif wrapper is optimizer:
        pairs = [(p, names[id(p)]) for group in optimizer.param_groups for p in group["params"]]
        yield from _whole_parameters(pairs, optimizer, world)
    else:
        raise ConfigError(
            f"the DeepSpeed JSON leads to {type(wrapper).__name__}, which fastdiff does not know; "
            "use one of the files in deepspeed_configs/"
        )


def _stage3_fragments(parameters: Iterable[Any], names: dict[int, str], rank: int) -> Iterator[Fragment]:
    """Yield this rank's fragments: ZeRO-3 cuts every parameter into W equal, zero-padded parts and joins them."""
    parameters = list(parameters)
    sizes = [p.partition_numel() for p in parameters]
    for parameter, size, end in zip(parameters, sizes, accumulate(sizes), strict=True):
        start = rank * size
        numel = min(size, parameter.ds_numel - start)
        if numel > 0:
            yield Fragment(names[id(parameter)], start, numel, end - size)


def _stage12_fragments(parameters: Iterable[Any], names: dict[int, str]) -> Iterator[Fragment]:
    """Yield this rank's fragments: ZeRO-1 and 2 join all parameters and cut the whole into W parts, across borders."""
    for parameter in parameters:
        mapping = parameter._hp_mapping
        if mapping is not None:
            low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
            yield Fragment(names[id(parameter)], low.start, low.numel, high.start)


def _whole_parameters(
    pairs: list[tuple[Tensor, str]], optimizer: torch.optim.Optimizer, world: World
) -> Iterator[Flat]:
    """Yield the whole parameters of ZeRO-0, equal on all ranks; their ownership is spread evenly, largest first."""
    load = [0] * world.size
    owner = {}
    for key, name in sorted(pairs, key=lambda pair: (-pair[0].numel(), pair[1])):
        owner[name] = load.index(min(load))
        load[owner[name]] += key.numel()
    for key, name in pairs:
        yield Flat(key, optimizer.state, (Fragment(name, 0, key.numel(), 0),), owned=owner[name] == world.rank)
