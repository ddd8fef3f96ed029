"""Speed-ups of training methods: steps to a baseline's final loss, and when they are called a gain."""

import math

import pytest

from fastdiff_bench.measure.speed_up import Curve, SpeedUp, speed_up

BASE = Curve([100, 200, 300, 400], [0.9, 0.7, 0.6, 0.5])


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        (BASE.losses, 1.0),
        ([0.7, 0.5, 0.45, 0.4], 2.0),
        ([0.7, 0.6, 0.4, 0.3], 400 / 250),  # between two validations
        ([0.9, 0.8, 0.7, 0.6], 300 / 400),  # the baseline was there earlier
        ([0.9, 0.8, 0.7, 0.65], 250 / 400),
        ([0.5, 0.5, 0.5, 0.5], 4.0),  # not later than the first validation
        ([0.9, 0.95, 0.95, 0.95], 0.0),
    ],
)
def test_a_speed_up_is_a_ratio_of_steps_to_one_loss(losses: list[float], expected: float) -> None:
    assert speed_up(BASE, Curve(BASE.steps, losses)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((1.4, 1.5, 1.45), "gain"),
        ((1.1, 1.12, 1.11), "no gain shown"),  # small, although every seed has it
        ((1.1, 1.8, 2.9), "no gain shown"),  # large, and uncertain
        ((0.94, *[1.4] * 20), "no gain shown"),  # a seed is worse, although the bound is above
        ((0.8, 0.82, 0.81), "slower"),
        ((0.0, 1.2, 1.2), "no gain shown"),
    ],
)
def test_a_gain_takes_a_bound_and_every_seed(values: tuple[float, ...], verdict: str) -> None:
    assert SpeedUp(values).verdict == verdict


def test_bounds_are_two_standard_errors_of_the_logarithms() -> None:
    found = SpeedUp((1.0, 2.0, 4.0))
    assert found.mean == pytest.approx(2.0)
    factor = 2 ** (2 / math.sqrt(3))
    assert found.bounds == pytest.approx((2.0 / factor, 2.0 * factor))
