"""Comparison of a run with a reference, number by number, corrected for how many there are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fastdiff.evaluation.conformance.numbers import Number, Numbers, Place
from fastdiff.evaluation.conformance.reference import Expected, Reference

SIGMAS = 2.0
LEVEL = math.erfc(SIGMAS / math.sqrt(2.0))
"""Probability of a deviation of two standard deviations or more, 0.0455; of all comparisons together."""
_TOLERANCE = 1e-3
"""Relative difference that never counts: rounding of the file, and of other hardware."""
_PRIOR = 3
"""Steps, at most, whose spread between runs counts as much as that of the step itself."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A number of a run against the reference."""

    place: Place
    value: float
    expected: float
    sigmas: float
    """Difference in standard deviations between runs, before the correction."""
    p: float
    """Probability of a difference as large of an honest run, corrected for the number of comparisons."""

    @property
    def deviates(self) -> bool:
        """Whether it is beyond two sigma after the correction."""
        return self.p < LEVEL


@dataclass(frozen=True, slots=True)
class Deviation:
    """A name whose numbers deviate after two steps in a row, or more."""

    name: str
    since: int
    """First of these steps."""
    first: Difference
    last: Difference


@dataclass(frozen=True, slots=True)
class Conformance:
    """What a comparison found."""

    compared: int
    """Numbers of the run that were compared."""
    steps: int
    """Step of the last of them."""
    names: frozenset[str]
    """Names with a comparison."""
    deviations: Sequence[Deviation]
    once: Sequence[Difference]
    """Beyond two sigma after a single step, which does not count."""
    missing: Sequence[str]
    """Names of the reference that the run has not recorded."""
    unknown: Sequence[str]
    """Names whose spread between runs the reference does not know."""


def compare(numbers: Numbers, reference: Reference) -> Conformance:
    """Compare the numbers of a run, as far as it is, with a reference.

    A number of a new run differs from the mean of K reference runs by chance with the variance ``v * (1 + 1/K)``. v is
    the larger of two: the variance between the reference runs after this step, and the same pooled over the steps of
    the name, in units of the standard error inside a run, or of the mean where that is unknown. (Pooling keeps a step
    at which few runs agree by chance from accusing the next one; compare Smyth 2004, doi:10.2202/1544-6115.1027.) The
    t-tests are corrected by Holm for all numbers of the reference, also those of later steps, so that a run may be
    compared as often as one likes.
    """
    by_name: dict[str, list[int]] = {}
    for name, step in reference.expected:
        by_name.setdefault(name, []).append(step)
    pooled = {name: _pooled(name, steps, reference) for name, steps in by_name.items()}
    unknown = [name for name, (ratio, _) in pooled.items() if ratio is None]
    places = [place for place in reference.expected if place[0] not in unknown]
    found = [_difference(place, numbers[place], reference, *pooled[place[0]]) for place in places if place in numbers]
    return conclude(found, len(places), reference.expected, unknown)


def conclude(
    found: Sequence[Difference], count: int, places: Iterable[Place] = (), unknown: Sequence[str] = ()
) -> Conformance:
    """Return what the differences of a run mean together.

    Args:
        found: with probabilities that are not corrected.
        count: of the comparisons, also of those to come.
        places: of the reference; empty: those of ``found``.
        unknown: names that cannot be compared.
    """
    corrected = _holm(found, count)
    by_name: dict[str, list[Difference]] = {}
    for one in sorted(corrected, key=lambda one: one.place[1]):
        by_name.setdefault(one.place[0], []).append(one)
    deviations = [deviation for known in by_name.values() if (deviation := _lasting(known)) is not None]
    told = {deviation.name for deviation in deviations}
    return Conformance(
        compared=len(corrected),
        steps=max((one.place[1] for one in corrected), default=0),
        names=frozenset(by_name),
        deviations=sorted(deviations, key=lambda one: (one.since, -abs(one.first.sigmas))),
        once=[one for one in corrected if one.deviates and one.place[0] not in told],
        missing=sorted({name for name, _ in places} - by_name.keys() - set(unknown)),
        unknown=unknown,
    )


def _unit(expected: Expected) -> float:
    return abs(expected.mean) if expected.error is None else expected.error


def _pooled(name: str, steps: Sequence[int], reference: Reference) -> tuple[float | None, float]:
    """Return the variance between runs in units of ``_unit``, and its degrees of freedom; None: it is not known."""
    cells = [reference.expected[name, step] for step in steps]
    if reference.runs < 2:
        return (1.0 if all(cell.error is not None for cell in cells) else None), math.inf
    ratios = [(cell.spread / _unit(cell)) ** 2 for cell in cells if cell.spread is not None and _unit(cell) > 0]
    degrees = (reference.runs - 1) * min(1 + _PRIOR, len(cells))
    return (math.fsum(ratios) / len(ratios) if ratios else 0.0), float(degrees)


def _difference(place: Place, number: Number, reference: Reference, ratio: float | None, degrees: float) -> Difference:
    expected = reference.expected[place]
    unit = _unit(expected) if number.error is None or expected.error is None else max(expected.error, number.error)
    variance = max((ratio or 0.0) * unit**2, (expected.spread or 0.0) ** 2) * (1 + 1 / reference.runs)
    deviation = math.sqrt(variance + (_TOLERANCE * expected.mean) ** 2)
    difference = number.value - expected.mean
    sigmas = difference / deviation if deviation else math.copysign(math.inf, difference) if difference else 0.0
    return Difference(place, number.value, expected.mean, sigmas, two_sided(sigmas, degrees))


def two_sided(sigmas: float, degrees: float) -> float:
    """Return the probability of a value as far from 0 under Student's t; infinite ``degrees``: under the normal."""
    if math.isinf(degrees):
        return math.erfc(abs(sigmas) / math.sqrt(2.0))
    from scipy.special import stdtr  # of scikit-learn, which has the digits

    return float(2 * stdtr(degrees, -abs(sigmas)))


def _holm(found: Sequence[Difference], count: int) -> list[Difference]:
    """Correct the probabilities for ``count`` comparisons, of which some may not be made yet.

    Holm 1979, Scand. J. Statistics 6, 65-70; comparisons to come count as the least significant.
    """
    largest = 0.0
    corrected: dict[Place, Difference] = {}
    for rank, one in enumerate(sorted(found, key=lambda one: one.p)):
        largest = max(largest, min(1.0, (count - rank) * one.p))
        corrected[one.place] = Difference(one.place, one.value, one.expected, one.sigmas, largest)
    return [corrected[one.place] for one in found]


def _lasting(known: Sequence[Difference]) -> Deviation | None:
    """Return the first deviation of a name after two of its steps in a row; None: there is none."""
    for before, one in pairwise(known):
        if before.deviates and one.deviates:
            return Deviation(known[0].place[0], before.place[1], before, known[-1])
    return None
