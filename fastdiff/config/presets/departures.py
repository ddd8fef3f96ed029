"""How a run departs from the published recipe of its preset, by flags or by its data set."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from fastdiff.config.presets import PRESETS
from fastdiff.config.presets.reported import REPORTED
from fastdiff.config.run import RunConfig

_COMPARED = ("samples", "model", "objective", "timesteps", "data.random_flip", "batch.samples", "optim", "ema.rates")
"""Fields and sections that make a recipe; the others are matters of the machine, of files and of more averages."""

_OF_PRESETS: Mapping[str, tuple[str, ...]] = {
    "sr-dit-b-1-256": (
        "a contrastive term of the pairs by position instead of the sample before in the batch of a rank",
    ),
}
"""What a preset itself has otherwise."""


def departure(config: RunConfig, preset: str | None) -> str:
    """Return in one line what of a run is not as in the published recipe of its preset; empty: nothing, or no recipe.

    First what the preset itself has otherwise.

    Names and numbers of classes follow from the data set, and so do channels and size: latents of another autoencoder
    make another network.
    """
    if preset is None or preset not in REPORTED:
        return ""
    ours, theirs = (dict(_fields(asdict(one))) for one in (config, PRESETS[preset]()))
    found = list(_OF_PRESETS.get(preset, ()))
    found += [
        f"{name} {ours.get(name)} instead of {theirs.get(name)}"
        for name in dict.fromkeys([*theirs, *ours])
        if ours.get(name) != theirs.get(name)
    ]
    return f"not the recipe of {preset}: {', '.join(found)}" if found else ""


def _fields(values: dict[str, Any], name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the compared fields with their dotted names."""
    for key, value in values.items():
        full = f"{name}.{key}" if name else key
        if isinstance(value, dict):
            yield from _fields(value, full)
        elif full in _COMPARED or full.split(".")[0] in _COMPARED:
            yield full, value
