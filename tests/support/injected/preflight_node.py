"""One node of a pre-flight, as a process.

``python -m tests.support.injected.preflight_node PORT NODE NODES AHEAD_S TRAIN FLAGS...``.

Ends as a supervisor would: 0, or the message and exit code of what is wrong.
"""

import sys
import time
from datetime import timedelta

from torch.distributed import TCPStore

from fastdiff.cluster.preflight import run
from fastdiff.config.command_line import train_flags
from fastdiff.errors import FastdiffError, report


def main(port: int, node: int, nodes: int, ahead_s: float, flags: list[str]) -> int:
    config = train_flags.parse(flags)[1]
    store = TCPStore("127.0.0.1", port, nodes, node == 0, timedelta(seconds=120), wait_for_workers=False)
    code = 0
    try:
        run.run(store, node, nodes, config, ranks_per_node=2, name=f"host{node}", now=lambda: time.time() + ahead_s)
    except FastdiffError as error:
        code = report(error)
    store.set(f"done/{node}", "")
    if node == 0:  # it hosts the store
        store.wait([f"done/{other}" for other in range(nodes)], timedelta(seconds=60))
    return code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5:]))
