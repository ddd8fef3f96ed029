"""Forward and backward pass of a micro-batch as a CUDA graph, which the host launches at once.

The graph has everything from the random numbers to the sums of gradients and losses. What differs between
micro-batches enters through a batch of static tensors; weights, sums and tables stay where they are. The first
micro-batch of a step, which overwrites the sums of gradients, has a graph of its own. Where products go from 16 bits
to FP8, or a training that leaves tokens out goes on with all, the graphs of the others are dropped, and the next ones
captured after a warm-up like the first.

Neither has a collective: the ranks add up their gradients behind the last micro-batch (``engines.flat_sum``). The
update of the weights is another graph, whose learning rate and shares of averages the host sends; between it and the
passes the ranks exchange their flags. It outlives the graphs of the passes, so it shares no memory with them.
"""

from collections.abc import Callable

from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.diffusion.objective import Objective
from fastdiff.errors import ConfigError
from fastdiff.models.delayed_scales import Forms
from fastdiff.parallel.world import World
from fastdiff.training.engines.flat import FlatEngine
from fastdiff.training.forward_backward.cuda_graphs import CudaGraphs, Pool
from fastdiff.training.forward_backward.micro_batch import ForwardBackward
from fastdiff.training.guard import StepGuard
from fastdiff.training.metrics import Meters


class GraphForwardBackward(ForwardBackward):
    """Both passes of a micro-batch, captured once and then replayed; it lets the engine capture its update, too.

    Args:
        engine: of the run.
        objective: of the run; its timesteps do not learn from losses.
        meters: of the run.
        guard: of the run.
        world: the ranks.
        set_weights: as of ``ForwardBackward``.
    """

    _engine: FlatEngine

    def __init__(
        self,
        engine: FlatEngine,
        objective: Objective,
        meters: Meters,
        guard: StepGuard,
        world: World,
        set_weights: Tensor | None = None,
    ) -> None:
        super().__init__(engine, objective, meters, guard, set_weights)
        self._graphs = CudaGraphs(world)
        self._passes: dict[bool, Callable[[], Tensor]] = {}
        """By whether the micro-batch is the first of its step; all have products and tokens of ``_kind``."""
        self._kind: tuple[Forms, bool] | None = None
        """Forms of the products, and whether all tokens pass all blocks."""
        self._pool = Pool()
        self._static: Batch | None = None
        engine.capture_update(self._graphs.later)

    @property
    def captures(self) -> int:
        """CUDA graphs that were captured so far."""
        return self._graphs.captured

    def __call__(self, batch: Batch) -> None:
        """Take the passes of one micro-batch; ConfigError if the passes cannot be captured."""
        with self._meters.phase("forward"):
            self._load(batch)
            if self._engine.begins_step:
                self._graphs.begin_step()
            losses = self._pass()().clone()  # the next replay overwrites them
            self._engine.end_micro_batch()
        self._meters.note(batch.position, losses)
        if self._guard.observe(losses):
            self._engine.discard()

    def _pass(self) -> Callable[[], Tensor]:
        """Return the passes of the next micro-batch."""
        kind, is_first = (self._engine.module.scales.forms, self._objective.is_dense), self._engine.begins_step
        if self._passes and kind != self._kind:
            self._graphs.free(self._passes)
            self._pool = Pool()
        self._kind = kind
        if is_first not in self._passes:
            self._passes[is_first] = self._graphs.later(self._section, self._pool)
        return self._passes[is_first]

    def _section(self) -> Tensor:
        """Run the passes of the static batch; return its losses ``[micro]``."""
        assert self._static is not None
        losses, drawn = self.forward(self._static)
        self._meters.count(losses, drawn.levels, drawn.importance, self._objective.parts, self._static.data_set)
        self._engine.add_gradient(losses.mean())
        return losses.detach()

    def _load(self, batch: Batch) -> None:
        """Copy a batch into the static one; ConfigError for other conditions, shapes or dtypes than in the first."""
        if self._static is None:
            self._static = Batch(
                batch.latents.clone(),
                batch.position.clone(),
                {name: value.clone() for name, value in batch.condition.items()},
                None if batch.mask is None else batch.mask.clone(),
                None if batch.data_set is None else batch.data_set.clone(),
            )
            return
        held, given = self._static.tensors(), batch.tensors()
        for name in sorted(held.keys() | given.keys()):
            found, expected = (_described(tensors.get(name)) for tensors in (given, held))
            if found != expected:  # copy_ would broadcast and cast, and a graph reads what it was captured with
                raise ConfigError(
                    f"--performance.cuda_graph: {name} of a micro-batch: {found}, expected {expected} as in the first; "
                    "leave the flag out",
                    everywhere=False,
                )
        for name, static in held.items():
            static.copy_(given[name])


def _described(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{list(tensor.shape)} {tensor.dtype}"
