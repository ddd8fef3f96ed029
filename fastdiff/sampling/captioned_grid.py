"""Pictures of prompts under their texts, in labelled columns: those of a base model beside those of now."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fastdiff.sampling.image_grid import BORDER, BORDER_GRAY, enlargement
from fastdiff.sampling.lettering import LEAST_FONT, cut, drawable, font_for

if TYPE_CHECKING:
    from PIL.Image import Image

    from fastdiff.sampling.lettering import Font

LAYOUT = "fastdiff-layout"
"""Keyword of the text in a PNG that says where its pictures are, the JSON of a ``Layout``."""
_IN_A_ROW, _GAP = 4, 8
"""Prompts beside one another, and the pixels between them."""
_MOST_LINES, _MOST_LETTERS = 4, 1000
"""Of the text above the pictures of a prompt."""
_SIZES_IN_A_LINE = 30
"""Width of the pictures of a prompt over the size of its letters."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of the pictures, in pixels from the upper left corner: those of a prompt are one column per label."""

    columns: tuple[str, ...]
    side: tuple[int, int]
    """Width and height of a picture."""
    pitch: tuple[int, int]
    """Distances from a picture to the one in the next column, and to the one below."""
    first: tuple[tuple[int, int], ...]
    """Upper left corner of the first picture of each prompt."""

    def as_text(self) -> str:
        """Return the text under ``LAYOUT``."""
        return json.dumps(asdict(self))


def captioned_grid(prompts: Sequence[str], columns: Mapping[str, Tensor]) -> tuple[Image, Layout]:
    """Lay out pictures of prompts, with the text of each prompt and the labels of the columns above.

    Args:
        prompts: P texts of any length, in any script; long texts lose their end. A text in a script that no font here
            has is replaced by the number of the prompt (``lettering``).
        columns: uint8 ``[N * P, 3, H, W]`` by label, N pictures of each prompt: picture i is of prompt i modulo P.

    Returns:
        A PIL image of mode RGB, small pictures enlarged as in ``image_grid``; and where the pictures are in it.
    """
    from PIL import Image as pillow
    from PIL import ImageDraw

    images = next(iter(columns.values()))
    scale, rows = enlargement(images), len(images) // len(prompts)
    height, width = (scale * side for side in images.shape[2:])
    pitch = width + BORDER, height + BORDER
    wide = len(columns) * pitch[0] - BORDER
    size = max(LEAST_FONT, wide // _SIZES_IN_A_LINE)
    line = size * 13 // 10
    fonts = [font_for(prompt, size) for prompt in prompts]
    texts = [
        wrapped(text, font, wide) or [f"prompt {n}"]
        for n, (text, font) in enumerate(zip(prompts, fonts, strict=True), 1)
    ]
    in_a_row = min(_IN_A_ROW, len(prompts))
    bands = range(0, len(prompts), in_a_row)
    heads = [line * (max(map(len, texts[band : band + in_a_row])) + 1) + _GAP for band in bands]
    tops = [_GAP + sum(heads[:n]) + n * (rows * pitch[1] + _GAP) for n in range(len(bands))]
    right, bottom = _GAP + in_a_row * (wide + _GAP), tops[-1] + heads[-1] + rows * pitch[1] + _GAP
    picture = pillow.new("RGB", (right, bottom), (BORDER_GRAY,) * 3)
    pen = ImageDraw.Draw(picture)
    first = []
    for number, text in enumerate(texts):
        band, place = divmod(number, in_a_row)
        x, y = _GAP + place * (wide + _GAP), tops[band] + heads[band]
        first.append((x, y))
        pen.multiline_text((x, tops[band]), "\n".join(text), fill="white", font=fonts[number], spacing=line // 5)
        for column, (label, pixels) in enumerate(columns.items()):
            left = x + column * pitch[0]
            font = font_for(label, size)
            label = cut(drawable(label, font), font, width)
            pen.text((left + width // 2, y - line // 2 - _GAP // 2), label, fill="white", font=font, anchor="mm")
            for row in range(rows):
                picture.paste(_enlarged(pixels[row * len(prompts) + number], scale), (left, y + row * pitch[1]))
    return picture, Layout(tuple(columns), (width, height), pitch, tuple(first))


def wrapped(text: str, font: Font, width: int) -> list[str]:
    """Return the lines of a text for a width in pixels, four at most; none: the font lacks its letters."""
    lines: list[str] = []
    for word in drawable(" ".join(text[:_MOST_LETTERS].split()), font).split():
        joined = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(joined) <= width:
            lines[-1] = joined
            continue
        while word:  # longer than a line: it is broken
            end = next((end for end in range(len(word), 1, -1) if font.getlength(word[:end]) <= width), 1)
            lines.append(word[:end])
            word = word[end:]
    if len(lines) > _MOST_LINES or len(text) > _MOST_LETTERS:
        lines = [*lines[: _MOST_LINES - 1], cut(" ".join(lines[_MOST_LINES - 1 :]) + " …", font, width)]
    return lines


def _enlarged(pixels: Tensor, scale: int) -> Image:
    """Return uint8 ``[3, H, W]`` as a picture of sharp squares."""
    from PIL import Image as pillow

    large = pixels.cpu().repeat_interleave(scale, 1).repeat_interleave(scale, 2)
    return pillow.fromarray(large.permute(1, 2, 0).contiguous().numpy())


def plain_grid(pixels: Tensor, columns: int) -> Image:
    """Return uint8 ``[N * columns, 3, H, W]`` as rows without borders, for ``pictures_of_grid``."""
    from PIL import Image as pillow

    count, channels, height, width = pixels.shape
    places = pixels.cpu().view(count // columns, columns, channels, height, width)
    return pillow.fromarray(places.permute(0, 3, 1, 4, 2).reshape(-1, columns * width, channels).contiguous().numpy())


def pictures_of_grid(levels: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Return the pictures ``[N, C, H, W]`` of a grid ``[rows * H, columns * W, C]`` of those of ``shape`` (C, H, W)."""
    channels, height, width = shape
    rows, columns = levels.shape[0] // height, levels.shape[1] // width
    places = levels.view(rows, height, columns, width, channels).permute(0, 2, 4, 1, 3)
    return places.reshape(rows * columns, channels, height, width).contiguous()
