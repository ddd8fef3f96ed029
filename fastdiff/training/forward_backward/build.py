"""Choice of the passes of a run."""

from torch import Tensor

from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.diffusion.objective import Objective
from fastdiff.parallel.world import World
from fastdiff.training.engines.base import Engine
from fastdiff.training.forward_backward.micro_batch import ForwardBackward
from fastdiff.training.guard import StepGuard
from fastdiff.training.metrics import Meters


def build_forward_backward(
    performance: PerformanceConfig,
    engine: Engine,
    objective: Objective,
    meters: Meters,
    guard: StepGuard,
    world: World,
    set_weights: Tensor | None = None,
) -> ForwardBackward:
    """Build the passes that ``--performance.cuda_graph`` names; ``config.cuda_graph`` has let it through."""
    if not performance.cuda_graph:
        return ForwardBackward(engine, objective, meters, guard, set_weights)
    from fastdiff.training.engines.flat import FlatEngine
    from fastdiff.training.forward_backward.graph import GraphForwardBackward

    assert isinstance(engine, FlatEngine)
    return GraphForwardBackward(engine, objective, meters, guard, world, set_weights)
