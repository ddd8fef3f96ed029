"""The pre-flight of a run on one node. Rank 0 makes it, so that the supervisor need not import what only ranks need."""

import os
import socket

from fastdiff.cluster.preflight.node_checks import examine_data, examine_space
from fastdiff.cluster.preflight.report import Problem, as_error
from fastdiff.cluster.preflight.run_folder import check_run_folder
from fastdiff.cluster.supervisor.environment import PREFLIGHT
from fastdiff.config.launch_options import Launch
from fastdiff.config.run import RunConfig
from fastdiff.data.loading.fit import check_data_set
from fastdiff.parallel.world import World, attempt


def check_files(config: RunConfig, launch: Launch) -> None:
    """Check what files and flags alone can tell; called before the ranks start, and by each before it meets the others.

    FastdiffError: as of ``check_run_folder`` and ``check_data_set``.
    """
    check_run_folder(config, launch)
    check_data_set(config, launch.preset)


def check_if_requested(config: RunConfig, world: World) -> None:
    """Check this node if its supervisor requests it; called by all ranks. FastdiffError: as of ``check``."""
    if os.environ.get(PREFLIGHT):
        world.on_rank0(lambda: check(config))


def check(config: RunConfig) -> None:
    """Check the data and the disk of a run on this node; nothing is written except the cache of remote data.

    FastdiffError: all problems, with the exit code of the first.
    """
    data = attempt(lambda: examine_data(config.data, config.validation))
    errors = [data[1], attempt(lambda: examine_space(config))[1]]
    problems = [Problem(0, socket.gethostname(), error.exit_code, str(error)) for error in errors if error]
    if problems:
        raise as_error(problems, nodes=1)
