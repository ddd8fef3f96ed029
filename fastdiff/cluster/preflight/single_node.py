"""The pre-flight of a run on one node. Rank 0 makes it, so that the supervisor need not import what only ranks need."""

from __future__ import annotations

import os

from torch.distributed import HashStore  # type: ignore[attr-defined]

from fastdiff.cluster.preflight.run import run
from fastdiff.cluster.supervisor.environment import PREFLIGHT
from fastdiff.config.run import RunConfig
from fastdiff.parallel.world import World


def check_if_requested(config: RunConfig, world: World) -> None:
    """Check this node if its supervisor requests it; called by all ranks.

    Raises:
        FastdiffError: all problems, with the exit code of the first.
    """
    if os.environ.get(PREFLIGHT):
        world.on_first(lambda: run(HashStore(), 0, 1, config, ranks_per_node=world.size))
