"""Engine without DeepSpeed, for ZeRO stage 0: flat buffers, one pass over them per step, and nothing read by the host.

The host waits once per step, when the update is queued: for the flags of the ranks (``parallel.consensus``).
Each rank has all weights and moments. The averages and checkpoints of a parameter are made by one rank.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from pkgutil import resolve_name

import torch
from torch import Tensor

from fastdiff.batch import Output
from fastdiff.config.deepspeed import DsConfig, zero_stage
from fastdiff.config.optimizers.registry import family_of
from fastdiff.config.run import RunConfig
from fastdiff.models.build import Model
from fastdiff.models.cost.memory import buffer_bytes, frozen_bytes
from fastdiff.models.kernel_choice import DTYPES
from fastdiff.models.matrices import matrices_of
from fastdiff.parallel.fragments import Flat, Fragment, Shapes
from fastdiff.parallel.world import World
from fastdiff.training.buffers import Gradients, Part, Place, fragments_of, move_into, places_of, ranges_of
from fastdiff.training.ema import Ema
from fastdiff.training.engines.base import Engine
from fastdiff.training.engines.data_parallel import DataParallel
from fastdiff.training.engines.flat_sum import FlatSum
from fastdiff.training.engines.ordered_sum import OrderedSum
from fastdiff.training.optimizer.build import (
    base_lr,
    build_lr_schedule,
    build_optimizer,
    forget,
    lrs_of,
    set_lr_step,
)
from fastdiff.training.optimizer.exact_norm import ExactNorm
from fastdiff.training.optimizer.update import Captured, Update


class FlatEngine(Engine):
    """A model with its optimizer in flat buffers.

    Args:
        model: on any device but ``meta``, fp32 weights; the engine moves and casts it.
        config: the run, as ``engines.build`` accepts it.
        ds_config: the resolved DeepSpeed JSON, of stage 0.
        world: the ranks.
    """

    kind = "flat"

    def __init__(self, model: Model, config: RunConfig, ds_config: DsConfig, world: World) -> None:
        precision = config.performance.precision
        self.stage, self.ds_config = zero_stage(ds_config), ds_config
        self.frozen_bytes, self.buffer_bytes = frozen_bytes(model, precision), buffer_bytes(model)
        self.shapes: Shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
        self.matrices = matrices_of(config, self.shapes)
        self._model, self._config, self._world = model, config, world
        family = family_of(config.optim)
        # Blocks and matrices have the elements in the order of the parameter, at every ZeRO stage.
        self._places = places_of(
            model,
            channels_last=model.channels_last and family.elementwise,
            lr_multiplier=config.model.lr_multiplier,
        )
        self._master, self._copy = move_into(self._places, model, DTYPES[precision], world.device)
        self._gradients = Gradients(self._places, self._sums_dtype, world.device)
        self._parts = self._cut(ranges_of(self._places, world))
        self.flats = [part.flat for part in self._parts]
        update = family.engine_update(in_order=config.performance.in_order)
        assert update is not None
        self._update: Update = resolve_name(update)(config.optim, self._parts, self._gradients)
        self._update.create_state(self.optimizer, self.shapes, self.matrices, world)
        self._ordered = (
            OrderedSum(self._places, self._gradients, DTYPES[precision], world) if config.performance.in_order else None
        )
        if self._ordered is not None:
            self._update.norms = ExactNorm(self._gradients.buffer)
        captured, several = config.performance.cuda_graph, world.size > 1 and self._ordered is None
        self._ranks = DataParallel(model, self._places, self._gradients) if several and not captured else None
        self._sum = FlatSum(self._gradients.buffer) if several and captured else self._ordered
        self._schedule = build_lr_schedule(self.optimizer, config.optim, config.steps)
        self._micro = self._applied = self._steps = 0
        self.lr = 0.0

    @property
    def _accumulation(self) -> int:
        return self._config.batch.accumulation(self._world.size)

    @property
    def _summands(self) -> int:
        return self._world.size * self._accumulation

    @property
    def _sums_dtype(self) -> torch.dtype:
        performance = self._config.performance
        return DTYPES[performance.sums if self._summands > 1 else performance.precision]

    def _cut(self, ranges: Sequence[tuple[bool, Sequence[Place]]]) -> list[Part]:
        """Cut the flat buffers, and create the optimizer, whose groups and states the update uses."""
        bounds = [(places[0].offset, places[-1].end) for _, places in ranges]
        keys = [self._master[first:end] for first, end in bounds]
        multipliers = [places[0].lr_multiplier for _, places in ranges]
        config = self._config
        self.optimizer = build_optimizer(
            keys,
            config.optim,
            skip_non_finite=False,
            multipliers=multipliers,
            in_order=config.performance.in_order,
        )
        return [
            Part(
                Flat(key, self.optimizer.state, fragments_of(places), owned=owned),
                first,
                self._gradients.buffer[first:end],
                None if self._copy is None else self._copy[first:end],
                places[0].lr_multiplier,
            )
            for key, (first, end), (owned, places) in zip(keys, bounds, ranges, strict=True)
        ]

    @property
    def module(self) -> Model:
        """The network."""
        return self._model

    def __call__(self, *inputs: Tensor, **condition: Tensor) -> Output:
        """Run the model's forward pass."""
        if self._ranks is None:
            return self._model(*inputs, **condition)  # type: ignore[no-any-return]
        return self._ranks(*inputs, reduces=self._is_last, **condition)

    @property
    def _is_last(self) -> bool:
        return self._micro == self._accumulation - 1

    def begin_last_micro_batch(self) -> None:
        """Make the next micro-batch the last of its step."""
        self._micro = self._accumulation - 1

    def backward(self, loss: Tensor, *, discard: bool = False) -> None:
        """Add the gradient of ``loss``, divided by the number of micro-batches of all ranks."""
        self.add_gradient(loss * math.nan if discard else loss)
        self.end_micro_batch()

    def add_gradient(self, loss: Tensor) -> None:
        """Add the gradient of ``loss`` by the device alone: the part of ``backward`` that a CUDA graph can hold."""
        (loss * (1.0 / self._summands)).backward()  # type: ignore[no-untyped-call]
        if self._ordered is not None:
            self._ordered.collect()
        elif self._ranks is None or not self._is_last:
            self._gradients.collect()
        self._gradients.release()

    def end_micro_batch(self) -> None:
        """Count a micro-batch whose gradient is added; in their order, the ranks add theirs here."""
        if self._ordered is not None:
            self._ordered.add()
        self._gradients.has_some = True
        self._micro += 1

    @property
    def begins_step(self) -> bool:
        """Whether the next micro-batch is the first of its step, whose gradient overwrites the sums."""
        return not self._gradients.has_some

    def discard(self) -> None:
        """Make the step change nothing, as if its gradient were not finite; after its last micro-batch."""
        self._gradients.buffer[0].fill_(math.nan)

    def named_calls(self) -> dict[str, list[tuple[object, str]]]:
        """Return the start of the reduction of a bucket, if there are several ranks."""
        return {} if self._ranks is None else {"reduce": [(self._ranks.buckets, "reduce")]}

    def attach(self, averages: Ema) -> None:
        """Move the averages in the update, unless other engines are to have their bits."""
        if self._ordered is not None:
            return
        self._update.averages, averages.in_the_update = averages, True

    def capture_update(self, captured: Captured) -> None:
        """Let CUDA graphs hold what of the update the device does by itself."""
        self._update.capture(captured)

    @torch.no_grad()
    def check_grads(self) -> Tensor:
        """Take the norm of the gradient; return whether it is not finite."""
        return self._update.examine([self._gradients.buffer.numel()] if self._sum is None else self._sum.arrived())

    def optimizer_step(self) -> None:
        """Take the optimizer step, unless the gradient is not finite."""
        self.lr = base_lr(self.optimizer)
        self._update.take(self._steps + 1, lrs_of(self.optimizer), self._applied + 1)
        self._gradients.has_some = False
        self._micro = 0

    def finish_step(self, *, skipped: bool) -> bool:
        """Count the step and set the learning rate of the next one."""
        if not skipped:
            self._applied += 1
            self._set_steps(self._steps + 1)
            set_lr_step(self._schedule, self._applied)
        return not skipped

    def _set_steps(self, steps: int) -> None:
        self._steps = steps
        self._update.count(steps)

    def grad_norm(self) -> Tensor | None:
        """Return the norm of the last gradient before clipping, left on its device; None before the first step."""
        return self._update.norm

    @property
    def loss_scale(self) -> dict[str, float]:
        """Empty: there is no fp16."""
        return {}

    def restore(self, applied: int, loss_scale: dict[str, float]) -> None:
        """Restore the learning rate and the numbers of steps, that of the optimizer from its state."""
        set_lr_step(self._schedule, applied)
        self._applied = applied
        self._set_steps(int(self.flats[0].state.get("step", applied)))

    @torch.no_grad()
    def return_to(self, read: Callable[[Fragment], Tensor]) -> None:
        """Load the weights of a checkpoint between two steps, and reset the optimizer state in place."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(read(Fragment(name, 0, parameter.numel(), 0)).view(parameter.shape))
        for flat in self.flats:
            forget(flat.state)

    @torch.no_grad()
    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Set nothing: under ZeRO-0 no network comes on ``meta``."""
        for name, _ in weights:
            raise RuntimeError(f"{name} is to be set after the construction, expected a network with its weights")
