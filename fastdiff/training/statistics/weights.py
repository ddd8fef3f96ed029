"""Sizes of the weights by group, and of their averages; each rank sums its fragments."""

import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from fastdiff.parallel.fragments import Flat, owned_fragments
from fastdiff.parallel.world import World
from fastdiff.training.ema import Ema
from fastdiff.training.engines.base import Engine

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def group_of(parameter: str) -> str:
    """Return the group of a parameter: the name with ``*`` for the numbers of blocks and layers."""
    return _NUMBER.sub("*", parameter)


@torch.no_grad()
def sizes(engine: Engine, averages: Ema, world: World) -> dict[str, float]:
    """Return root mean squares by group of parameters, and of each average its size and distance; called by all ranks.

    ``weights/GROUP``: root mean square. ``averages/NAME/size`` and ``averages/NAME/distance``: norms of the average and
    of its difference from the weights, over the norm of the weights. ``averages/NAME/share``: its elements over theirs.
    """
    counts: dict[str, int] = {}
    for name, shape in engine.shapes.items():
        group = group_of(name)
        counts[group] = counts.get(group, 0) + math.prod(shape)
    squares = _squares(engine.flats, list(counts), world)
    total, elements = math.fsum(squares.values()), sum(counts.values())
    found = {f"weights/{group}": math.sqrt(squares[group] / count) for group, count in counts.items()}
    for name, tensors in averages.averages.items():
        size, distance, covered = _against_weights(engine.flats, tensors, world)
        found[f"averages/{name}/share"] = covered / elements
        found[f"averages/{name}/size"] = math.sqrt(size / total) if total else math.nan
        found[f"averages/{name}/distance"] = math.sqrt(distance / total) if total else math.nan
    return found


def _squares(flats: Sequence[Flat], groups: Sequence[str], world: World) -> dict[str, float]:
    found: dict[str, list[Tensor]] = {group: [] for group in groups}
    for fragment, values in owned_fragments(flats, [flat.master for flat in flats]):
        found[group_of(fragment.name)].append(_square(values))
    return dict(zip(groups, _summed([_total(found[group]) for group in groups], world), strict=True))


def _against_weights(flats: Sequence[Flat], average: Sequence[Tensor | None], world: World) -> list[float]:
    """Return the squared norms of an average and of its difference from the weights, and its number of elements."""
    size, distance, count = [], [], 0
    masters = {
        (fragment.name, fragment.start): values
        for fragment, values in owned_fragments(flats, [flat.master for flat in flats])
    }
    for fragment, values in owned_fragments(flats, average):
        size.append(_square(values))
        distance.append(_square(values - masters[fragment.name, fragment.start]))
        count += values.numel()
    return _summed([_total(size), _total(distance), torch.tensor(float(count), dtype=torch.float64)], world)


def _square(values: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
    return norm.square()


def _total(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).sum() if values else torch.zeros((), dtype=torch.float64)


def _summed(values: Sequence[Tensor], world: World) -> list[float]:
    return world.sum_(torch.stack([value.to(world.device) for value in values])).tolist()  # type: ignore[no-any-return]
