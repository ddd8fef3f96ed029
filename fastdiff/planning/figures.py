"""The figures of a plan for a run that starts: memory of a rank, time of a step and of the whole, and a warning."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fastdiff.config.deepspeed import DsConfig, offloads_optimizer
from fastdiff.config.run import RunConfig
from fastdiff.durations import in_words
from fastdiff.models.cost.memory import setup_of
from fastdiff.planning.gpus import Gpus, of_device
from fastdiff.planning.memory import memory
from fastdiff.planning.network import read_network
from fastdiff.planning.options import work_of
from fastdiff.planning.rates import Interval
from fastdiff.planning.scaling.zero import Zero
from fastdiff.planning.step_time import step_time

_FIFTH = 0.2


@dataclass(frozen=True, slots=True)
class Figures:
    """Predictions for a run."""

    peak_bytes: float
    """Of a rank."""
    step_s: Interval | None
    """None: the table does not have the device."""
    samples: int
    """Of a step."""

    def words(self, steps: int) -> str:
        """Return them for a log, with the time of this many steps."""
        held = f"planned: up to {self.peak_bytes / 2**30:.3g} GiB on each GPU"
        if self.step_s is None:
            return f"{held}, with weights, gradients, optimizer and activations"
        step, rate = self.step_s, self.step_s.under(self.samples)
        return (
            f"{held}, {1e3 * step.middle:.0f} ms per step "
            f"({1e3 * step.low:.0f} to {1e3 * step.high:.0f}), {rate.middle:.0f} images/s, "
            f"{in_words(step.middle * steps)} to the end"
        )

    def departure(self, record: Mapping[str, float]) -> str | None:
        """Return how a record departs from the plan by more than a fifth; None: it does not, or there is no time."""
        if self.step_s is None:
            return None
        step_s, peak = 1e-3 * record["step_ms"], record["peak_gib"] * 2**30
        found = []
        if step_s > (1 + _FIFTH) * self.step_s.high or step_s < (1 - _FIFTH) * self.step_s.low:
            found.append(f"{1e3 * step_s:.0f} ms per step instead of {1e3 * self.step_s.middle:.0f}")
        if abs(peak / self.peak_bytes - 1) > _FIFTH:
            found.append(f"{peak / 2**30:.1f} GiB on a GPU instead of {self.peak_bytes / 2**30:.1f}")
        return f"the run departs from its plan: {', '.join(found)}" if found else None


def figures(
    config: RunConfig, ds_config: DsConfig, ranks: int, per_node: int, device: str, *, flat: bool
) -> Figures | None:
    """Return the figures of a run on GPUs; None with an optimizer on the host.

    Args:
        config: of the run, with its micro-batch.
        ds_config: the resolved DeepSpeed JSON.
        ranks: of the job.
        per_node: ranks of a node.
        device: name of the GPU, as the driver reports it; the table need not have it.
        flat: the run has the flat engine.
    """
    if offloads_optimizer(ds_config):
        return None
    network = read_network(config, torch.device("cuda"))
    setup = setup_of(
        config, ds_config, ranks, flat=flat, trained=network.trained, in_matrices=network.in_matrices,
        frozen_bytes=network.frozen_bytes, buffer_bytes=network.buffer_bytes, blocks=network.blocks,
    )  # fmt: skip
    held = memory(
        setup, network.traced(config.performance), accumulates=config.batch.accumulation(ranks) > 1,
        bucket=Zero.of(ds_config).reduce_bucket,
    )  # fmt: skip
    kind = of_device(device)
    if kind is None or config.performance.precision not in kind.rates:
        return Figures(held.peak, None, config.batch.samples)
    gpus = Gpus(kind, max(1, ranks // per_node), min(ranks, per_node))
    return Figures(held.peak, step_time(work_of(config, ds_config, network, ranks), gpus).whole, config.batch.samples)


def held_on_cpu(
    config: RunConfig, ds_config: DsConfig, ranks: int, trained: int, in_matrices: int, *, flat: bool
) -> str:
    """Return the memory of a rank on a CPU in words, for a log: what follows from the parameters, at no cost.

    A pass is not traced there: on small networks that takes longer than it is worth.

    Args:
        config: of the run, with its micro-batch.
        ds_config: the resolved DeepSpeed JSON.
        ranks: of the job.
        trained: parameters.
        in_matrices: of them those in matrices that the network declares to the optimizer.
        flat: the run has the flat engine.
    """
    setup = setup_of(
        config, ds_config, ranks, flat=flat, trained=trained, in_matrices=in_matrices, frozen_bytes=0, buffer_bytes=0,
        blocks=0,
    )  # fmt: skip
    parts = {name: size for name, size in setup.static().items() if size}
    told = ", ".join(f"{name} {_mib(size)}" for name, size in parts.items())
    return f"planned: each rank holds {_mib(sum(parts.values()))} MiB ({told}) and the activations of a micro-batch"


def _mib(size: float) -> str:
    mib = size / 2**20
    return f"{mib:,.0f}" if mib >= 100 else f"{mib:.3g}"
