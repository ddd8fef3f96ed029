"""A wrapper that runs a command and lets it end with its parent; run by path, without importing fastdiff.

``python -I die_with_parent.py PARENT COMMAND...``: the kernel sends SIGTERM when PARENT ends for any reason. The
setting survives ``exec``, so it holds from the start, long before the command itself could request it.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(sys.argv[1]):  # PARENT has already ended
        sys.exit(128 + signal.SIGTERM)
    os.execv(sys.argv[2], sys.argv[2:])
