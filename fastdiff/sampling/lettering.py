"""Letters in pictures: Pillow's own font, which has those of English, or for other texts a font of the machine."""

from __future__ import annotations

import unicodedata
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont, ImageFont

    Font = FreeTypeFont | ImageFont

LEAST_FONT = 12
"""Size of letters in pixels, below which they are hard to read."""
_NO_LETTER = "\U0010ffff"
_OF_MACHINES = (
    "DejaVuSans.ttf",  # Latin, Greek, Cyrillic, Arabic, Hebrew
    "NotoSansCJK-Regular.ttc", "unifont.otf", "wqy-microhei.ttc", "DroidSansFallbackFull.ttf",  # with East Asia's
)  # fmt: skip
"""Free fonts of Linux distributions, by the names of their files."""


def font_for(text: str, size: int) -> Font:
    """Return the first font that has every letter of a text, or else the one that lacks the fewest."""
    from PIL import ImageFont

    letters = set(unicodedata.normalize("NFC", text))
    best: Font = ImageFont.load_default(size)
    least = _count_lacking(best, letters)
    for name in _OF_MACHINES:
        font = _opened(name, size) if least else None
        if font is not None and (lacking := _count_lacking(font, letters)) < least:
            best, least = font, lacking
    return best


def drawable(text: str, font: Font) -> str:
    """Return a text in letters of a font: others lose their accents or become ?, and a text of none else is empty."""
    drawn = "".join(_drawable(letter, font) for letter in unicodedata.normalize("NFC", text))
    return drawn if any(letter.isalnum() for letter in drawn) else ""


def cut(plain: str, font: Font, width: int) -> str:
    """Return a text cut to a width in pixels."""
    if font.getlength(plain) <= width:
        return plain
    kept = next((end for end in range(len(plain) - 1, 0, -1) if font.getlength(f"{plain[:end]}…") <= width), 0)
    return f"{plain[:kept]}…"


def _drawable(letter: str, font: Font) -> str:
    if not _lacks(font, letter):
        return letter
    bare = "".join(part for part in unicodedata.normalize("NFKD", letter) if not unicodedata.combining(part))
    return "".join("?" if _lacks(font, part) else part for part in bare)


def _count_lacking(font: Font, letters: set[str]) -> int:
    return sum(_lacks(font, letter) for letter in letters)


def _lacks(font: Font, letter: str) -> bool:
    return bytes(font.getmask(letter)) == bytes(font.getmask(_NO_LETTER))


@cache
def _opened(name: str, size: int) -> Font | None:
    """Return a font of the machine; None: it is not there."""
    from PIL import ImageFont

    try:
        return ImageFont.truetype(name, size)
    except OSError:
        return None
