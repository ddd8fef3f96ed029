"""Run by path, with nothing imported: makes itself die with the process that started it, then becomes a command.

``python -I die_with_parent.py PARENT COMMAND...``: the kernel sends SIGTERM when PARENT ends, however it does. It
keeps that order over ``exec``, so it holds from the first moment, long before the command could ask for it itself.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(sys.argv[1]):  # it ended before
        sys.exit(128 + signal.SIGTERM)
    os.execv(sys.argv[2], sys.argv[2:])
