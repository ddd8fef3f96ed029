"""Names of numbers in the trackers: those of ``metrics.jsonl``, with the range of noise levels in words."""

import re

from fastdiff.diffusion.snr_bins import BINS, SNR_EDGES
from fastdiff.training.metrics import QUARTILES

_BIN = re.compile(r"(.+)_snr_(\d\d)")
_QUARTER = re.compile(r"(.+)_q(\d)")


def shown(name: str) -> str:
    """Return the tag of a number: ``loss/log_snr -1.25..0`` for ``loss_snr_07``.

    ``loss_q0`` becomes ``loss/depth 0..0.25``: the share of the noising process, 0 at the data.
    """
    if found := _BIN.fullmatch(name):
        return f"{found[1]}/log_snr {range_of(int(found[2]))}"
    if found := _QUARTER.fullmatch(name):
        place = int(found[2])
        return f"{found[1]}/depth {place / QUARTILES:g}..{(place + 1) / QUARTILES:g}"
    return name


def range_of(number: int) -> str:
    """Return the range of a bin of the log SNR: ``-1.25..0``."""
    if number == 0:
        return f"below {SNR_EDGES[0]:g}"
    if number == BINS - 1:
        return f"above {SNR_EDGES[-1]:g}"
    return f"{SNR_EDGES[number - 1]:g}..{SNR_EDGES[number]:g}"
