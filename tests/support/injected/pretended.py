"""A script on a pretended machine: ``pretended.py SCRIPT ARGUMENTS...``, in a process that has imported torch."""

import importlib
import runpy
import sys
from typing import Any

from tests.support.injected.pretended_gpu import CHANGED, SITE

names: dict[str, Any] = {}
exec(SITE, names)
for name in CHANGED:
    names["change"](name, importlib.import_module(name))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
