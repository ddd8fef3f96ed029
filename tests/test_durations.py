"""Durations: one unit each, chosen after rounding, so that no border shows 120 min beside 2 h."""

from datetime import datetime

import pytest

from fastdiff.durations import in_words
from fastdiff.progress_bar import _clock
from fastdiff.training.callbacks.summary import time_left

_UNITS = {"s": 1, "min": 60, "h": 3600, "days": 86_400}


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"), (0.42, "0.42 s"), (9.97, "10 s"), (59, "59 s"), (119, "119 s"), (119.7, "2 min"), (120, "2 min"),
        (754, "12.6 min"), (7_150, "119 min"), (7_199, "2 h"), (7_200, "2 h"), (86_399, "24 h"), (172_799, "2 days"),
        (17.14 * 86_400, "17.1 days"), (1e9, "11,574 days"),
    ],
)  # fmt: skip
def test_a_duration_has_the_unit_that_suits_it(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


def test_longer_durations_never_read_as_shorter() -> None:
    """Around each border, in tenths of a second."""
    for border in (60, 120, 3_600, 7_200, 86_400, 172_800):
        told = [in_words(border + tenth / 10) for tenth in range(-60, 60)]
        values = [float(number) * _UNITS[unit] for number, unit in map(str.split, told)]
        assert values == sorted(values), told
        assert not {"120 s", "120 min", "48 h"} & set(told)


def test_clocks_carry_their_seconds() -> None:
    now = datetime(2026, 1, 1)
    assert [_clock(seconds) for seconds in (59.6, 3_599.6, 86_399.6)] == ["1:00", "1:00:00", "1 d 0 h"]
    assert [time_left(36_000, 36_000 / seconds, now).partition(" to go")[0] for seconds in (59.6, 3_599.6)] == [
        "about 1 min 00 s", "about 1 h 00 min",
    ]  # fmt: skip
