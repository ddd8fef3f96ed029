"""Classes as users give them: by name or number, alone, in a list or as a range.

A word that is a name means that class, also where the name looks like a number: of the folders 10, 2 and 7, the word 2
means the folder 2. Any other word is a number. Names that are all whole numbers also make the ends of ranges. A word
whose number would be another class than its name is reported.
"""

import difflib
import operator
import unicodedata
from collections.abc import Sequence

from fastdiff.console import log
from fastdiff.errors import ConfigError, require
from fastdiff.sanitize import escape

ClassChoice = str | Sequence[int | str]
"""A text such as ``flower,temple`` or ``0-9``; or names and numbers one by one."""

_MOST = 100_000
"""Largest number of chosen classes."""
_DIGITS = 18
_SHOWN = 10
"""Names in a message."""
_NO = range(0)


class ClassNames:
    """The classes of a network.

    Args:
        count: number of classes; 0: none.
        names: in the order of their numbers; empty: unknown.
    """

    def __init__(self, count: int, names: Sequence[str] = ()) -> None:
        self.count, self.names = count, tuple(names)
        self._numbers: dict[str, list[int]] = {}
        for number, name in enumerate(self.names):
            self._numbers.setdefault(_normal(name), []).append(number)
        values = {int(name): number for number, name in enumerate(self.names) if _is_whole(name)}
        self._by_value = values if len(values) == len(self.names) > 0 else None
        """Number of the class by the value of its name, if all names are whole numbers."""
        self._most_parts = 1 + max((name.count(",") for name in self.names), default=0)

    def numbers(self, choice: ClassChoice) -> list[int]:
        """Return the numbers of the chosen classes, as ordered; ConfigError: a word is no class, or can be several."""
        if isinstance(choice, str):
            found = [number for word in self._words(choice) for number in self._checked(word)]
        else:
            found = [number for item in choice for number in self._of_item(item)]
        require(bool(found), f"--classes: none are given; expected {self._expected}")
        require(len(found) <= _MOST, f"--classes: {len(found)} classes, at most {_MOST}")
        return found

    def titles(self, numbers: Sequence[int]) -> list[str]:
        """Return the names of classes, with the number of one whose name another has; empty if they have none."""
        return [self._title(number) for number in numbers] if self.names else []

    def _title(self, number: int) -> str:
        name = self.names[number]
        return escape(name) if len(self._numbers[_normal(name)]) == 1 else f"{escape(name)} ({number})"

    def _words(self, text: str) -> list[str]:
        """Split a text at the commas that are no part of a name."""
        parts = text.split(",")
        starts: list[list[int]] = [[0], *([] for _ in parts)]
        """By the part that a word ends before: the parts that it can start with."""
        for end in range(1, len(parts) + 1):
            first = max(0, end - self._most_parts)
            starts[end] = [start for start in range(first, end) if starts[start] and self._read(parts[start:end])]
        if not starts[-1]:
            raise self._unknown(parts[max(end for end, found in enumerate(starts) if found)])
        words, end = [], len(parts)
        while end:
            word = ",".join(parts[starts[end][0] : end])
            require(
                len(starts[end]) == 1,
                f"--classes {escape(word)}: the name of one class, or those of several; give numbers",
            )
            words.append(word)
            end = starts[end][0]
        return words[::-1]

    def _of_item(self, item: int | str) -> list[int]:
        if isinstance(item, str):
            if not self._read([item]):
                raise self._unknown(item)
            return self._checked(item)
        try:
            number = operator.index(item)
        except TypeError:
            raise ConfigError(f"--classes {escape(str(item))}: expected {self._expected}") from None
        if not 0 <= number < self.count:
            raise self._unknown(str(number))
        self._say_conflict(number, "taken as a number")
        return [number]

    def _named(self, text: str) -> list[int]:
        """Return the numbers of the classes of a name, blanks around it aside."""
        return self._numbers.get(_normal(text)) or self._numbers.get(_normal(text.strip())) or []

    def _read(self, parts: Sequence[str]) -> list[int]:
        """Return the classes of a name, a number or a range; empty if the text is none of them."""
        text = ",".join(parts)
        if named := self._named(text):
            return named
        values = _range(text)
        if not 0 < len(values) <= self.count:
            return []
        if self._by_value is None:
            return list(values) if values[-1] < self.count else []
        found = [self._by_value[value] for value in values if value in self._by_value]
        return found if len(found) == len(values) else []

    def _checked(self, word: str) -> list[int]:
        """Return the classes of a word that is some; refuse or report two meanings."""
        found, named, values = self._read([word]), self._named(word), _range(word)
        shown = escape(word.strip())
        require(len(named) < 2, f"--classes {shown}: {len(named)} classes have this name; give their numbers: {named}")
        if named or self._by_value is not None:
            if len(values):
                self._say_conflict(values[0], "taken as a name")
            return found
        for number in values:
            if (other := self._other(number)) is not None:
                raise ConfigError(
                    f"--classes {shown}: number {number} is the class {self.names[number]}, and the class named "
                    f"{number} has the number {other}; give names"
                )
        return found

    def _say_conflict(self, value: int, how: str) -> None:
        """Say how a value was taken that is the number of a class and the name of another one."""
        other = self._other(value) if value < self.count else None
        if other is not None:
            log.warning(
                f"--classes: {value} is {how}; number {value} is the class {escape(self.names[value])}, and the class "
                f"named {value} has the number {other}"
            )

    def _other(self, number: int) -> int | None:
        """Return the class whose name is the number of another one."""
        if self._by_value is not None:
            other = self._by_value.get(number)
            return None if other == number else other
        named = self._numbers.get(str(number), [number])
        return None if number in named else named[0]

    def _unknown(self, word: str) -> ConfigError:
        shown = escape(word.strip()[:100])
        if not self.count:
            return ConfigError(f"--classes {shown}: the model was trained with no classes; leave it out")
        if not self.names:
            return ConfigError(f"--classes {shown}: the model was trained with {self._expected}")
        near = self._nearest(word.strip())
        hint = f"; did you mean {near}?" if near else ""
        return ConfigError(f"--classes {shown}: no such class{hint}; expected {self._expected}")

    def _nearest(self, word: str) -> str:
        folded = {name.casefold(): name for name in self.names}
        near = difflib.get_close_matches(word.casefold(), folded, n=1)
        return escape(folded[near[0]]) if near else ""

    @property
    def _expected(self) -> str:
        last = self.count - 1
        if not self.names:
            return f"classes 0-{last}, which have no names; give them as 0-9 or 1,5,7"
        shown = ", ".join(map(escape, self.names[:_SHOWN]))
        more = f" and {self.count - _SHOWN} others" if self.count > _SHOWN else ""
        return f"{shown}{more}" + ("" if self._by_value is not None else f", or numbers 0-{last}")


def _normal(name: str) -> str:
    """Return the form in which names are compared: that of ``dataset.json``, composed."""
    return unicodedata.normalize("NFC", escape(name))


def _range(text: str) -> range:
    """Return the whole numbers of ``7`` or ``0-9``; empty if the text is neither."""
    low, dash, high = (end.strip() for end in text.partition("-"))
    return range(int(low), int(high if dash else low) + 1) if _is_whole(low) and (not dash or _is_whole(high)) else _NO


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _DIGITS
