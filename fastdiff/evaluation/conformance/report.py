"""The result of a comparison in words, and as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastdiff.diffusion.snr_bins import name_of
from fastdiff.evaluation.conformance.causes import likely
from fastdiff.evaluation.conformance.comparison import SIGMAS, Conformance, Deviation, Difference
from fastdiff.plurals import counted
from fastdiff.tables import table

_BIN = re.compile(r"(.+)_snr_(\d\d)")
_SHOWN = 16
"""Names in a table."""
_NAMED = 4
"""Names in a sentence."""


def shown(name: str) -> str:
    """Return a name for readers: ``loss at log SNR 0.00 to 1.25`` for ``loss_snr_07``."""
    found = _BIN.fullmatch(name)
    return f"{found[1]} at log SNR {name_of(int(found[2]))}" if found else name


def verdict(found: Conformance, recipe: str) -> str:
    """Return the result in one line."""
    if not found.deviations:
        extent = f"{counted(found.compared, 'number')} up to step {found.steps:,}"
        return f"as {recipe}, within {SIGMAS:g} sigma ({extent}, corrected for their number)"
    first = found.deviations[0]
    names = ", ".join(shown(one.name) for one in found.deviations[:_NAMED])
    more = f" and {len(found.deviations) - _NAMED} more" if len(found.deviations) > _NAMED else ""
    return f"not as {recipe} since step {first.since:,}: {names}{more}"


def in_log(found: Conformance, recipe: str) -> str:
    """Return the result with the likely causes, for the log of a run."""
    causes = [f"{cause.title} (check {cause.check})" for cause in likely(found)]
    return f"{verdict(found, recipe)}{'; likely causes: ' if causes else ''}{'; or '.join(causes)}"


def in_words(found: Conformance, recipe: str, differing: Mapping[str, str], room: int | None = None) -> str:
    """Return the whole result.

    Args:
        found: the comparison.
        recipe: what the run was compared with, in words.
        differing: fields of the configuration that differ from those of the reference, and how.
        room: columns of a terminal; None: one line per row.
    """
    lines = [verdict(found, recipe)]
    if found.deviations:
        lines += ["", table([_HEAD, *map(_row, found.deviations[:_SHOWN])], (0,), room)]
        if len(found.deviations) > _SHOWN:
            lines.append(f"and {len(found.deviations) - _SHOWN} more; --json has all")
        lines += ["", *_causes(found)]
    if differing:
        lines += ["", "the configuration differs from that of the reference:"]
        lines += [f"  --{name}: {change}" for name, change in differing.items()]
    return "\n".join([*lines, *_notes(found)])


_HEAD = ["deviates", "since step", "reference", "run", "sigma", "last step", "reference", "run", "sigma"]


def _row(one: Deviation) -> list[str]:
    return [shown(one.name), f"{one.since:,}", *_cells(one.first), f"{one.last.place[1]:,}", *_cells(one.last)]


def _cells(one: Difference) -> list[str]:
    return [f"{one.expected:.4g}", f"{one.value:.4g}", f"{one.sigmas:+.1f}"]


def _causes(found: Conformance) -> list[str]:
    causes = likely(found)
    if not causes:
        return ["no known cause explains this; compare the configuration, the data and the code with the recipe"]
    lines = ["likely causes, the likeliest first:"]
    return lines + [f"  {number}. {cause.title}: check {cause.check}" for number, cause in enumerate(causes, start=1)]


def _notes(found: Conformance) -> list[str]:
    """Return what was not compared, or does not count."""
    lines = []
    if found.once:
        names = _some(sorted({shown(one.place[0]) for one in found.once}))
        lines.append(f"beyond {SIGMAS:g} sigma after a single step, which does not count: {names}")
    if found.missing:
        lines.append(f"not compared, as the run has not recorded it: {_some(found.missing)}")
    if found.unknown:
        lines.append(f"not compared, as one run has no spread between runs: {_some(found.unknown)}")
    return ["", *lines] if lines else []


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def as_json(found: Conformance, differing: Mapping[str, str]) -> dict[str, Any]:
    """Return the result as values of JSON."""
    return {
        "conforms": not found.deviations,
        "compared": found.compared,
        "step": found.steps,
        "deviations": [
            {"name": one.name, "since": one.since, "first": _values(one.first), "last": _values(one.last)}
            for one in found.deviations
        ],
        "causes": [{"name": cause.name, "title": cause.title, "check": cause.check} for cause in likely(found)],
        "once": [{"name": one.place[0], **_values(one)} for one in found.once],
        "missing": list(found.missing),
        "unknown": list(found.unknown),
        "configuration": dict(differing),
    }


def _values(one: Difference) -> dict[str, float]:
    found = {"reference": one.expected, "run": one.value, "sigmas": one.sigmas, "p": one.p}
    return {"step": one.place[1], **{name: value for name, value in found.items() if value - value == 0}}
