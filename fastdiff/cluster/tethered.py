"""The supervisor of a node that lives as long as someone holds its standard input open.

The end of the input counts as SIGTERM. So it ends with the ssh connection that started it, whatever became of the
other side: ssh passes neither signals nor its own death on to what it runs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from fastdiff.cluster import supervisor


def _watch_input() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_watch_input, name="tether", daemon=True).start()
    sys.exit(supervisor.main(sys.argv[1:]))
