"""Count the GPUs that a process would see, without the seconds that an import of torch takes."""

import os
from pathlib import Path

_NODES = Path("/dev")


def visible_gpus() -> int:
    """Return the number of NVIDIA GPUs that this user may open and that CUDA_VISIBLE_DEVICES shows.

    It is the number of ranks to start by default, and no proof that torch can use them: the ranks find that out.
    """
    nodes = [path for path in _NODES.glob("nvidia[0-9]*") if os.access(path, os.R_OK | os.W_OK)]
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None or not nodes:
        return len(nodes)
    names = [name.strip() for name in shown.split(",")]
    return next((place for place, name in enumerate(names) if name in ("", "-1")), len(names))  # as CUDA reads it
