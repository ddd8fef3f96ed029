"""Forward and backward pass of a micro-batch, operation by operation."""

from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.diffusion.levels import Corruption
from fastdiff.diffusion.objective import Objective
from fastdiff.training.engines.base import Engine
from fastdiff.training.guard import StepGuard
from fastdiff.training.metrics import Meters


class ForwardBackward:
    """Both passes of a micro-batch, which add its gradient to the engine and its losses to the meters and the guard.

    Args:
        engine: of the run.
        objective: of the run.
        meters: of the run.
        guard: of the run.
        set_weights: ``[K]`` fp32, factors of the losses of each data set, on the device; None: the run has one.
    """

    def __init__(
        self,
        engine: Engine,
        objective: Objective,
        meters: Meters,
        guard: StepGuard,
        set_weights: Tensor | None = None,
    ) -> None:
        self._engine, self._objective, self._meters, self._guard = engine, objective, meters, guard
        self._set_weights = set_weights

    @property
    def captures(self) -> int:
        """CUDA graphs that were captured so far."""
        return 0

    def __call__(self, batch: Batch) -> None:
        """Take the passes of one micro-batch of this rank; called by all ranks."""
        with self._meters.phase("forward"):
            losses, drawn = self.forward(batch)
        self._meters.add(losses, batch.position, drawn.levels, drawn.importance, self._objective.parts, batch.data_set)
        discard = self._guard.observe(losses)
        self._engine.backward(losses.mean(), discard=discard)

    def forward(self, batch: Batch, *, recorded: bool = True) -> tuple[Tensor, Corruption]:
        """Return the losses ``[micro]`` of a micro-batch, and the noise levels that were drawn.

        Args:
            batch: of this rank.
            recorded: whether a density of timesteps that learns from losses learns from these.
        """
        corruption = self._objective.add_noise(batch, self._engine)
        prediction = self._engine(corruption.noisy, corruption.time, **corruption.condition)
        # [micro, C, H, W] -> [micro]
        losses = self._objective.loss(prediction, batch, corruption, recorded=recorded)
        if batch.data_set is not None and self._set_weights is not None:
            losses = losses * self._set_weights[batch.data_set]
        return losses, corruption
