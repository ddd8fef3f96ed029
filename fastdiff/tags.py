"""Variants of captions that are lists of tags: the tags are shuffled, and some are dropped. Imports no torch.

Tags, kept tags, prefix and suffix are those of kohya's sd-scripts (``process_caption``). There a caption is shuffled
anew in every epoch, by a generator of each process; here a variant is a function of the caption and of the name of its
draw alone, so it depends on neither processes nor versions of Python.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Self

from fastdiff.errors import require

_BITS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Tags:
    """How the variants of a caption are made; the fields have the names of the options that give them."""

    shuffle_tags: bool = False
    """Whether the order of the tags is drawn."""
    tag_separator: str = ","
    """Between two tags of a caption; those of a variant are joined by a comma and a blank."""
    keep_tokens: int = 0
    """First tags that are neither shuffled nor dropped, those of the prefix included."""
    keep_separator: str = ""
    """Ends the tags at the beginning that are kept, instead of their number; a second one begins those at the end."""
    drop_tags: float = 0.0
    """Probability of each other tag to be dropped."""
    caption_prefix: str = ""
    """Put before every caption, with a blank."""
    caption_suffix: str = ""
    """Put behind every caption, with a blank."""

    @classmethod
    def of(cls, options: object) -> Self:
        """Return the fields of options that have all of them."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})

    def require_consistent(self, flag: Callable[[str], str]) -> None:
        """Raise ConfigError for values out of range, or that have no effect; ``flag`` names the option of a field."""
        shuffle, drop, keep = flag("shuffle_tags"), flag("drop_tags"), flag("keep_tokens")
        require(0 <= self.drop_tags < 1, f"{drop} {self.drop_tags:g}: a probability from 0 to below 1")
        require(self.keep_tokens >= 0, f"{keep} {self.keep_tokens}: a number of tags, 0 or more")
        require(bool(self.tag_separator.strip()), f"{flag('tag_separator')} is empty; give the mark between two tags")
        require(
            not (self.keep_tokens and self.keep_separator),
            f"{keep} {self.keep_tokens} and {flag('keep_separator')} both say which tags are kept; omit one",
        )
        if not self.splits:
            default = {field.name: field.default for field in fields(self)}
            idle = ("tag_separator", "keep_tokens", "keep_separator")
            given = [flag(name) for name in idle if getattr(self, name) != default[name]]
            require(not given, f"{given[0] if given else ''} has no effect without {shuffle} or {drop}; omit it")

    @property
    def splits(self) -> bool:
        """Whether captions are split into tags."""
        return self.shuffle_tags or self.drop_tags > 0

    def whole(self, caption: str) -> str:
        """Return a caption with prefix and suffix, and all its tags in their order."""
        return ", ".join(tag for part in self._parts(caption) for tag in part)

    def variant(self, caption: str, draw: str) -> str:
        """Return a variant of a caption; empty if all its tags are dropped.

        Args:
            caption: As in the source.
            draw: Name of the draw: equal names give equal variants of a caption.
        """
        first, between, last = self._parts(caption)
        if not self.splits:
            return self.whole(caption)
        lots = [_lots(draw, number) for number in range(len(between))]
        kept = [number for number, (share, _) in enumerate(lots) if share >= self.drop_tags]
        if self.shuffle_tags:
            kept.sort(key=lambda number: lots[number][1])
        return ", ".join([*first, *(between[number] for number in kept), *last])

    def _parts(self, caption: str) -> tuple[list[str], list[str], list[str]]:
        """Return the tags that are kept at the beginning, those that may be shuffled, and those kept at the end."""
        text = " ".join(part for part in (self.caption_prefix, caption, self.caption_suffix) if part)
        if not self.splits:
            return [text], [], []
        if self.keep_separator and self.keep_separator in text:
            first, between, *last = text.split(self.keep_separator, 2)
            return self._split(first), self._split(between), self._split(*last)
        every = self._split(text)
        return every[: self.keep_tokens], every[self.keep_tokens :], []

    def _split(self, text: str = "") -> list[str]:
        return [tag for part in text.split(self.tag_separator) if (tag := part.strip())]


def _lots(draw: str, number: int) -> tuple[float, int]:
    """Return a number in [0, 1) that says whether a tag is dropped, and an integer that orders the tags."""
    digest = hashlib.sha256(f"{draw}/{number}".encode()).digest()
    share, order = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")
    return (share >> 11) / 2 ** (_BITS - 11), order
