"""A script that dies before one of its calls that make something durable: ``dying.py NUMBER SCRIPT ARGUMENTS...``."""

import runpy
import sys

from tests.support.injected.durable_calls import DURABLE, dying_at

if __name__ == "__main__":
    number, sys.argv = int(sys.argv[1]), sys.argv[2:]
    with dying_at(number, DURABLE):
        runpy.run_path(sys.argv[0], run_name="__main__")
