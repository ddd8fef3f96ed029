"""Variants of captions: the rules of kohya's sd-scripts, and draws that follow from their name alone."""

import itertools
from collections import Counter
from typing import Any

import pytest

from fastdiff.errors import ConfigError
from fastdiff.tags import Tags

CAPTION = "sks, dog, red, small, on a lawn"


@pytest.mark.parametrize(
    ("options", "caption", "first", "between", "last"),
    [
        ({"keep_tokens": 2}, CAPTION, ["sks", "dog"], ["red", "small", "on a lawn"], []),
        ({}, "a , b,, c,", [], ["a", "b", "c"], []),
        ({"tag_separator": ";"}, "a, b; c", [], ["a, b", "c"], []),
        ({"keep_tokens": 9}, CAPTION, CAPTION.split(", "), [], []),
        # A prefix without a separator belongs to the first tag.
        ({"caption_prefix": "photo of", "keep_tokens": 1}, "sks, a, b", ["photo of sks"], ["a", "b"], []),
        ({"caption_prefix": "x,", "caption_suffix": ", y", "keep_tokens": 1}, "a, b", ["x"], ["a", "b", "y"], []),
        ({"keep_separator": "|||"}, "a, b ||| c, d, e ||| f, g", ["a", "b"], ["c", "d", "e"], ["f", "g"]),
        ({"keep_separator": "|||", "caption_prefix": "sks |||"}, "c, d", ["sks"], ["c", "d"], []),
        ({"keep_separator": "|||"}, "c, d", [], ["c", "d"], []),
    ],
)
def test_kept_tags_stay_in_their_places(
    options: dict[str, Any], caption: str, first: list[str], between: list[str], last: list[str]
) -> None:
    """Every order of the others is drawn, about equally often."""
    tags = Tags(shuffle_tags=True, **options)
    drawn = Counter(tags.variant(caption, f"0/{number}") for number in range(600))
    expected = {", ".join([*first, *order, *last]) for order in itertools.permutations(between)}
    assert drawn.keys() == expected
    assert min(drawn.values()) > 0.7 * 600 / len(expected)
    assert tags.whole(caption) == ", ".join([*first, *between, *last])


def test_each_tag_is_dropped_by_itself_and_kept_ones_never() -> None:
    tags = Tags(drop_tags=0.3, keep_tokens=1)
    drawn = [tags.variant(CAPTION, f"7/{number}").split(", ") for number in range(2000)]
    others = CAPTION.split(", ")[1:]
    assert all(found[0] == "sks" and found[1:] == [tag for tag in others if tag in found] for found in drawn)
    for tag in others:
        assert sum(tag in found for found in drawn) / 2000 == pytest.approx(0.7, abs=0.05)
    both = sum(others[0] in found and others[1] in found for found in drawn) / 2000
    assert both == pytest.approx(0.49, abs=0.05)
    assert {Tags(drop_tags=0.9).variant("a, b", str(n)) for n in range(99)} == {"", "a", "b", "a, b"}


def test_a_draw_is_the_same_everywhere() -> None:
    """Recorded: it must not change, or an encode that goes on would mix two draws."""
    tags = Tags(shuffle_tags=True, drop_tags=0.2, keep_tokens=1)
    assert [tags.variant(CAPTION, f"5/000000003/0/{n}") for n in range(3)] == RECORDED


RECORDED = [
    "sks, red, small, dog, on a lawn",
    "sks, red, small, on a lawn, dog",
    "sks, small, on a lawn, dog, red",
]


def test_a_caption_stays_as_it_is_without_variants() -> None:
    assert Tags().variant(" a , b,, c", "0") == Tags().whole(" a , b,, c") == " a , b,, c"
    dressed = Tags(caption_prefix="photo of", caption_suffix="at night")
    assert dressed.variant("a house, red", "0") == "photo of a house, red at night"
    assert dressed.variant("", "0") == "photo of at night"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop_tags": 1.0}, "drop_tags 1: a probability from 0 to below 1"),
        ({"drop_tags": float("nan")}, "drop_tags nan: a probability"),
        ({"keep_tokens": 1}, "keep_tokens has no effect without shuffle_tags or drop_tags"),
        ({"shuffle_tags": True, "tag_separator": " "}, "tag_separator is empty"),
        ({"shuffle_tags": True, "keep_tokens": 1, "keep_separator": "|"}, "both say which tags are kept"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Tags(**options).require_consistent(str)
