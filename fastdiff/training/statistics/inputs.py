"""Statistics of what the network gets in chosen steps, over all ranks; the same numbers for any number of ranks."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.diffusion.objective import Objective
from fastdiff.diffusion.snr_bins import Floats
from fastdiff.parallel.world import World
from fastdiff.training.statistics.samples import columns_of, moments

_BLOCKS = 16
"""Blocks of samples that are left out in turn for the standard errors."""

Measured = dict[str, tuple[float, float | None]]
"""Statistics and their standard errors, None where samples are too few, by name."""


class InputStatistics:
    """Numbers of the samples of some steps, kept on the device until they are read.

    A step that is not ``wanted`` costs nothing; one that is costs a few passes over the latents, and no wait.
    """

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self.wanted = False
        """Whether the micro-batches of the next step count; the ranks agree."""
        self._kept: list[tuple[Tensor, dict[str, Tensor]]] = []

    def observe(self, batch: Batch) -> None:
        """Keep the numbers of a micro-batch that was trained on, if they are wanted."""
        if self.wanted:
            self._kept.append((batch.position, columns_of(batch, self._objective)))

    def read(self, world: World) -> Measured:
        """Return the statistics of the samples since the last read, of all ranks; called by all ranks.

        The samples are added up in the order of their positions, whichever rank had them.
        """
        names = list(self._kept[0][1]) if self._kept else []
        mine = [torch.cat([position for position, _ in self._kept]).cpu().numpy()] if names else []
        mine += [torch.cat([columns[name] for _, columns in self._kept]).cpu().numpy() for name in names]
        self._kept.clear()
        shares = [share for share in world.gather((names, mine)) if share[0]]
        if not shares:
            return {}
        position, *columns = (np.concatenate(parts) for parts in zip(*(share[1] for share in shares), strict=True))
        ascending = np.argsort(position)
        return measured(dict(zip(shares[0][0], (column[ascending] for column in columns), strict=True)))


def measured(columns: Mapping[str, Floats]) -> Measured:
    """Return the statistics of samples, with their standard errors by the jackknife over blocks of neighbours.

    Args:
        columns: ``[N]`` each, by name (``samples.columns_of``).
    """
    blocks = [
        {name: float(part.sum()) for name, part in zip(columns, parts, strict=True)}
        for parts in zip(
            *(np.array_split(column, min(_BLOCKS, len(column))) for column in columns.values()), strict=True
        )
    ]
    total = {name: math.fsum(block[name] for block in blocks) for name in columns}
    without = [moments({name: total[name] - block[name] for name in columns}) for block in blocks if len(blocks) > 1]
    return {
        name: (value, _jackknife([found[name] for found in without if name in found]))
        for name, value in moments(total).items()
    }


def _jackknife(values: Sequence[float]) -> float | None:
    """Return the standard error of a statistic from its values without each block (Efron & Stein 1981, eq. 1.3)."""
    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    return math.sqrt((count - 1) / count * math.fsum((value - mean) ** 2 for value in values))
