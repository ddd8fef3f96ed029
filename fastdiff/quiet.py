"""Silences what libraries say that a user of fastdiff can neither mend nor needs to know."""

from __future__ import annotations

import logging
import warnings


def quieten() -> None:
    """Call once per process, after DeepSpeed is imported, which sets the level of its logger."""
    # DeepSpeed: dozens of lines of its own settings; what matters of them stands in run.json.
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # bitsandbytes: its 4-bit inference kernels for CPUs, which nothing here uses.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # torch.distributed: names that DeepSpeed still calls, once per step.
    warnings.filterwarnings("ignore", message=".*is deprecated.*", category=FutureWarning)
    # diffusers: the multistep solver hands a tensor to numpy.
    warnings.filterwarnings("ignore", message=".*__array__ implementation.*", category=DeprecationWarning)
