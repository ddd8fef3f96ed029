"""How much a process tells on standard error, and those that it starts.

``--quiet`` leaves warnings, errors and the printed results; ``--verbose`` adds details, what libraries say, and the
traceback of an error. The choice is a variable of the environment, so that ranks and workers have it, too.
"""

import os

QUIET, VERBOSE = "quiet", "verbose"
VARIABLE = "FASTDIFF_VERBOSITY"


def is_quiet() -> bool:
    """Return whether messages below a warning, and bars, are left out."""
    return os.environ.get(VARIABLE) == QUIET


def is_verbose() -> bool:
    """Return whether details are told."""
    return os.environ.get(VARIABLE) == VERBOSE
