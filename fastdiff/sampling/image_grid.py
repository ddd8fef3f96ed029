"""Many small images as one picture."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.errors import ConfigError
from fastdiff.outputs import write_output
from fastdiff.sampling.lettering import LEAST_FONT, cut, drawable, font_for

if TYPE_CHECKING:
    from PIL.Image import Image

_READABLE = 64
BORDER = 2
BORDER_GRAY = 96


def image_grid(images: Tensor, rows: int | None = None, scale: int | None = None, titles: Sequence[str] = ()) -> Image:
    """Lay out images row by row, with a thin border around each.

    Args:
        images: ``[N, C, H, W]`` floating point, N at least 1. One channel is gray and three are RGB, both in
            [-1, 1] and clipped. With any other number (latents of an autoencoder) the first three channels are
            shown, each stretched to its own minimum and maximum; two channels are padded with a black one.
        rows: Number of rows; None: as close to a square as possible. Empty places keep the colour of the
            border.
        scale: Whole-number enlargement, each pixel staying a sharp square; None: to a side of 64 or just
            above, and 1 for images that are larger.
        titles: One per column, drawn above it; empty: none. Long titles lose their end. A title in a script that no
            font here has stays blank (``lettering``).

    Returns:
        A PIL image of mode RGB (L for one channel).

    Raises:
        ValueError: ``images`` is not ``[N, C, H, W]`` with N at least 1, or ``rows`` or ``scale`` is below 1.
    """
    from PIL import Image as pillow

    if images.ndim != 4 or not images.numel():
        raise ValueError(f"images {tuple(images.shape)}: expected [N, C, H, W] with N at least 1")
    if scale is None:
        scale = enlargement(images)
    rows = round(len(images) ** 0.5) or 1 if rows is None else rows
    if rows < 1 or scale < 1:
        raise ValueError(f"rows {rows}, scale {scale}: at least 1")
    levels = _levels(images.detach().float().cpu())
    enlarged = levels.repeat_interleave(scale, dim=2).repeat_interleave(scale, dim=3)
    canvas = _arrange(enlarged, rows).permute(1, 2, 0)
    grid = pillow.fromarray(canvas.squeeze(2).contiguous().numpy())
    return _titled(grid, titles) if titles else grid


def encoded(picture: Image, suffix: str, texts: Mapping[str, str] | None = None) -> bytes:
    """Return a picture as the content of a file.

    Args:
        picture: of mode L or RGB.
        suffix: chooses the format.
        texts: of a PNG, by keyword, before its pixels.

    Raises:
        ConfigError: Pillow writes no format with this suffix.
    """
    from PIL import Image as pillow
    from PIL.PngImagePlugin import PngInfo

    name = pillow.registered_extensions().get(suffix.lower())
    if name not in pillow.SAVE:
        raise ConfigError(f"no picture can be written with the suffix {suffix!r}; use .png")
    buffer, about = io.BytesIO(), PngInfo()
    for keyword, text in (texts or {}).items():
        about.add_text(keyword, text)
    picture.save(buffer, name, **({"pnginfo": about} if texts else {}))
    return buffer.getvalue()


def save_picture(path: Path, picture: Image) -> None:
    """Write a picture to a file that the user named (``outputs.write_output``).

    Raises:
        ConfigError: Pillow writes no format with the suffix of ``path``.
        OSError: with the path; it cannot be written, and an earlier file stays.
    """
    write_output(path, encoded(picture, path.suffix))


def _titled(grid: Image, titles: Sequence[str]) -> Image:
    """Return a taller picture with the titles above the columns of a grid."""
    from PIL import Image as pillow
    from PIL import ImageDraw

    pitch = (grid.width - BORDER) // len(titles)
    size = max(LEAST_FONT, pitch // 16)
    header = size * 3 // 2
    gray = BORDER_GRAY if grid.mode == "L" else (BORDER_GRAY,) * 3
    picture = pillow.new(grid.mode, (grid.width, grid.height + header), gray)
    picture.paste(grid, (0, header))
    pen = ImageDraw.Draw(picture)
    for column, title in enumerate(titles):
        font = font_for(title, size)
        middle = BORDER + column * pitch + pitch // 2, header // 2
        pen.text(middle, cut(drawable(title, font), font, pitch - BORDER), fill="white", font=font, anchor="mm")
    return picture


def enlargement(images: Tensor) -> int:
    """Return the whole-number enlargement of ``[N, C, H, W]`` to a side of at least 64 pixels."""
    return max(1, -(-_READABLE // min(images.shape[2:])))


def _levels(images: Tensor) -> Tensor:
    """Convert ``[N, C, H, W] -> [N, 1 or 3, H, W]`` uint8; non-finite values become black."""
    if images.shape[1] in (1, 3):
        unit = (images + 1) / 2
    else:
        shown = images[:, :3]
        low, high = (f(shown.nan_to_num(0, 0, 0), (0, 2, 3), True) for f in (torch.amin, torch.amax))
        unit = F.pad((shown - low) / (high - low).clamp(min=1e-12), (0, 0, 0, 0, 0, 3 - shown.shape[1]))
    return (unit.nan_to_num(0, 0, 0).clamp(0, 1) * 255).round().to(torch.uint8)


def _arrange(images: Tensor, rows: int) -> Tensor:
    """Arrange ``[N, C, H, W]`` uint8 ``-> [C, rows * (H + border) + border, columns * (W + border) + border]``."""
    columns = -(-len(images) // rows)
    framed = F.pad(images, (0, BORDER, 0, BORDER), value=BORDER_GRAY)
    count, channels, height, width = framed.shape
    missing = framed.new_full((rows * columns - count, channels, height, width), BORDER_GRAY)
    places = torch.cat([framed, missing]).view(rows, columns, channels, height, width)
    canvas = places.permute(2, 0, 3, 1, 4).reshape(channels, rows * height, columns * width)
    return F.pad(canvas, (BORDER, 0, BORDER, 0), value=BORDER_GRAY)
