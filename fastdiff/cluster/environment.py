"""What the ranks of a node find in their environment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from fastdiff.heartbeat import NODE_FOLDER

_NCCL = "nccl"


def of_rank(
    base: Mapping[str, str],
    *,
    local_rank: int,
    ranks_per_node: int,
    node: int,
    nodes: int,
    master: tuple[str, int],
    node_folder: Path,
    extensions: Path,
    run: Path,
) -> dict[str, str]:
    """Return the environment of one rank.

    Args:
        base: of the supervisor.
        local_rank: on this node.
        ranks_per_node: on every node.
        node: number of this node.
        nodes: how many there are.
        master: host and port of the supervisors' store, where the ranks meet too: its port is taken, not about to be.
        node_folder: of this run on this node.
        extensions: where its compiled operators are.
        run: the run folder; what NCCL's flight recorder knows at a time-out goes to ``nccl/`` in it.
    """
    return {
        **base,
        "RANK": str(node * ranks_per_node + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(nodes * ranks_per_node),
        "LOCAL_SIZE": str(ranks_per_node),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        NODE_FOLDER: str(node_folder),
        "TORCH_EXTENSIONS_DIR": str(extensions),
        # https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
        "TORCH_FR_BUFFER_SIZE": base.get("TORCH_FR_BUFFER_SIZE", "2000"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{run.absolute() / _NCCL}/rank-",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{node_folder / _NCCL}-",
    }


def request_nccl_dumps(node_folder: Path, run: Path) -> None:
    """Let NCCL's flight recorder write what it knows of every rank of this node; without NCCL do nothing.

    It would at its time-out, which comes after the hang was found.
    """
    pipes = list(node_folder.glob(f"{_NCCL}-*.pipe"))
    if pipes:
        (run / _NCCL).mkdir(parents=True, exist_ok=True)
    for pipe in pipes:
        with contextlib.suppress(OSError):  # nobody reads it any more
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(descriptor, b"1")
            finally:
                os.close(descriptor)
