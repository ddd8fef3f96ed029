"""The figures of a plan for a run that starts: memory of a rank, time of a step and of the whole, and a warning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fastdiff.config.deepspeed import DsConfig, offloads_optimizer
from fastdiff.config.run import RunConfig
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
    step_s: Interval
    samples: int
    """Of a step."""

    def words(self, steps: int) -> str:
        """Return them for a log, with the time of this many steps."""
        step, rate = self.step_s, self.step_s.under(self.samples)
        hours = step.middle * steps / 3600
        return (
            f"planned: {self.peak_bytes / 2**30:.1f} GiB of a rank, {1e3 * step.middle:.0f} ms per step "
            f"({1e3 * step.low:.0f} to {1e3 * step.high:.0f}), {rate.middle:.0f} images/s, "
            + (f"{hours / 24:.1f} days" if hours >= 48 else f"{hours:.1f} hours")
            + " to the end"
        )

    def departure(self, record: Mapping[str, float]) -> str | None:
        """Return how a record of the log departs from the plan by more than a fifth; None if it does not.

        Args:
            record: with ``step_ms`` and ``peak_gib``.
        """
        step_s, peak = 1e-3 * record["step_ms"], record["peak_gib"] * 2**30
        found = []
        if step_s > (1 + _FIFTH) * self.step_s.high or step_s < (1 - _FIFTH) * self.step_s.low:
            found.append(f"{1e3 * step_s:.0f} ms per step instead of {1e3 * self.step_s.middle:.0f}")
        if abs(peak / self.peak_bytes - 1) > _FIFTH:
            found.append(f"{peak / 2**30:.1f} GiB of a rank instead of {self.peak_bytes / 2**30:.1f}")
        return f"the run departs from its plan: {', '.join(found)}" if found else None


def figures(
    config: RunConfig, ds_config: DsConfig, ranks: int, per_node: int, device: str, *, flat: bool
) -> Figures | None:
    """Return the figures of a run; None on a device that is not in the table, or with an optimizer on the host.

    Args:
        config: of the run, with its micro-batch.
        ds_config: the resolved DeepSpeed JSON.
        ranks: of the job.
        per_node: ranks of a node.
        device: name of the GPU, as the driver reports it.
        flat: the run has the flat engine.
    """
    kind = of_device(device)
    if kind is None or offloads_optimizer(ds_config) or config.performance.precision not in kind.rates:
        return None
    again = config.performance.recompute
    network = read_network(config, torch.device("cuda"), (again,))
    setup = setup_of(
        config, ds_config, ranks, flat=flat, trained=network.trained, frozen_bytes=network.frozen_bytes,
        buffer_bytes=network.buffer_bytes,
    )  # fmt: skip
    held = memory(
        setup, network.passes[again], accumulates=config.batch.accumulation(ranks) > 1,
        bucket=Zero.of(ds_config).reduce_bucket,
    )  # fmt: skip
    gpus = Gpus(kind, max(1, ranks // per_node), min(ranks, per_node))
    return Figures(held.peak, step_time(work_of(config, ds_config, network, ranks), gpus).whole, config.batch.samples)
