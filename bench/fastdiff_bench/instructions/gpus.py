"""The GPU that stands for each compute capability, in the table of ``fastdiff plan``."""

from fastdiff.planning.gpus import Gpu, known


def _by_capability() -> dict[int, Gpu]:
    found = {gpu.multiprocessors.capability: gpu for gpu in known() if gpu.multiprocessors}
    return dict(sorted(found.items(), key=lambda pair: pair[0]))


GPUS = _by_capability()
"""By compute capability, 90 for sm_90: those whose multiprocessors the table has."""
