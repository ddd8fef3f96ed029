"""Choice of the passes of a run."""

from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.data.loading.bucket_order import BucketOrder
from fastdiff.data.loading.order import SampleOrder
from fastdiff.diffusion.objective import Objective
from fastdiff.errors import require
from fastdiff.parallel.world import World
from fastdiff.training.engines.base import Engine
from fastdiff.training.engines.build import Kind
from fastdiff.training.forward_backward.micro_batch import ForwardBackward
from fastdiff.training.guard import StepGuard
from fastdiff.training.metrics import Meters


def build_forward_backward(
    performance: PerformanceConfig, engine: Engine, objective: Objective, meters: Meters, guard: StepGuard
) -> ForwardBackward:
    """Build the passes that ``--performance.cuda_graph`` names; ``require_capture`` has been called."""
    if not performance.cuda_graph:
        return ForwardBackward(engine, objective, meters, guard)
    from fastdiff.training.engines.flat import FlatEngine
    from fastdiff.training.forward_backward.graph import GraphForwardBackward

    assert isinstance(engine, FlatEngine)
    return GraphForwardBackward(engine, objective, meters, guard)


def require_capture(performance: PerformanceConfig, engine: Kind, world: World) -> None:
    """Raise ConfigError, with the remedy, where ``--performance.cuda_graph`` cannot work on this machine."""
    if not performance.cuda_graph:
        return
    require(
        world.device.type == "cuda",
        f"--performance.cuda_graph on a {world.device.type}: a graph holds the work of a GPU; leave the flag out",
    )
    require(
        world.size == 1,
        f"--performance.cuda_graph on {world.size} ranks: torch's DistributedDataParallel reads from the device in "
        "every step, which no graph can hold; use one GPU, or leave the flag out",
    )
    require(
        engine == "flat",
        "--performance.cuda_graph with DeepSpeed, whose hooks run on the host: train with --performance.engine flat "
        "(ZeRO stage 0), or leave the flag out",
    )


def require_one_shape(performance: PerformanceConfig, path: str, order: SampleOrder) -> None:
    """Refuse ``--performance.cuda_graph`` for data of several latent sizes, those of ``path``."""
    require(
        not performance.cuda_graph or not isinstance(order, BucketOrder),
        f"--performance.cuda_graph with {path}, whose latents have several sizes: a graph has the shapes "
        "of one; encode with one size, or leave the flag out",
    )
