"""What an image file is, from its header: format, size and whether every decoder gives the same pixels for it.

Nothing is decoded here and no canvas is allocated, so that a file of a few kB that unpacks to gigabytes is refused
before it costs anything.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Literal

from PIL import ExifTags, Image
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from fastdiff.data.images.geometry import Size, area

MAX_PIXELS = 2**27
"""Largest image, before and after the resize: 11,585 x 11,585 or 20,000 x 6,710, half a GB in Pillow."""

MAX_SCANS = 256
"""Most scans of a progressive JPEG. Each one costs a pass over the whole image, however few bytes it has; encoders
write about ten."""

_RIFF_BYTES = 8  # what the length in a RIFF header leaves out
_JPEG_TAIL = 4096  # where the end marker is looked for: some programs append data of their own
_PLAIN_CHUNKS = {b"IHDR", b"IDAT", b"IEND", b"tEXt", b"tIME", b"pHYs", b"gAMA", b"cHRM", b"sRGB", b"iCCP", b"sBIT"}


class RefusedImageError(ValueError):
    """The image is not used, for the reason in the message."""


@dataclass(frozen=True)
class Header:
    """What the header of an image says.

    Attributes:
        image: The image, opened by Pillow and not yet decoded.
        size: Height and width in pixels as stored, before any EXIF rotation.
        plain: True for an 8-bit grey or RGB image that is complete, upright and alone in its file, of which every
            decoder makes the same pixels. The others are decoded by Pillow only.
    """

    image: Image.Image
    size: Size
    plain: bool


def read_header(data: bytes) -> Header:
    """Look at the first bytes of a JPEG, PNG or WebP file.

    ICC profiles are ignored, here and by all decoders: pixels are taken as sRGB.

    Raises:
        RefusedImageError: Another format, an empty or damaged file, more than ``MAX_PIXELS`` pixels, or a
            progressive JPEG of more than ``MAX_SCANS`` scans.
    """
    if not data:
        raise RefusedImageError("an empty file (0 bytes)")
    kind = _format(data)
    try:
        if kind == "JPEG":
            return _jpeg(data)
        return _png(data) if kind == "PNG" else _webp(data)
    except (RefusedImageError, MemoryError):
        raise
    except Exception as error:  # on damaged bytes Pillow raises nearly anything
        raise RefusedImageError(f"a damaged {kind} file: {describe(error)}") from error


def check_pixels(size: Size, what: str = "") -> None:
    """Refuse an image of too many pixels.

    Raises:
        RefusedImageError: ``size`` has more than ``MAX_PIXELS`` pixels; ``what`` says after what.
    """
    if area(size) > MAX_PIXELS:
        raise RefusedImageError(f"{size[1]}x{size[0]} pixels{what}, more than {MAX_PIXELS} in all")


def orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8; 1 (upright) if there is none or it cannot be read."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # as in read_header; the pixels may be sound all the same
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def describe(error: Exception) -> str:
    """One line for an exception of a decoder."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _format(data: bytes) -> Literal["JPEG", "PNG", "WebP"]:
    """By the signature: the name of the file says nothing."""
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    raise RefusedImageError(f"neither JPEG, PNG nor WebP: it starts with {data[:12]!r}")


def _jpeg(data: bytes) -> Header:
    # The class and not Image.open, which checks the size against a limit of its own and, in files of several
    # images (MPO), looks for the others.
    image = JpegImageFile(io.BytesIO(data))
    size = _size(image)
    if image.info.get("progressive") and (scans := data.count(b"\xff\xda")) > MAX_SCANS:
        raise RefusedImageError(f"a progressive JPEG of {scans} scans, more than {MAX_SCANS}")
    plain = _is_grey_or_ycbcr(image) and b"\xff\xd9" in data[-_JPEG_TAIL:] and orientation(image) == 1
    return Header(image, size, plain)


def _is_grey_or_ycbcr(image: JpegImageFile) -> bool:
    """Beyond doubt: JPEGs in RGB are told by their components' names or by Adobe's marker, or not at all."""
    if image.mode == "RGB":
        return [component[0] for component in image.layer] == [1, 2, 3] and image.info.get("adobe_transform") != 0
    return image.mode == "L"


def _png(data: bytes) -> Header:
    image = PngImageFile(io.BytesIO(data))
    depth, color = data[24], data[25]
    grey_or_rgb = depth == 8 and color in (0, 2)
    return Header(image, _size(image), grey_or_rgb and _has_plain_chunks(data))


def _has_plain_chunks(data: bytes) -> bool:
    """Whether a PNG is complete and has no transparency, animation or EXIF."""
    position, kind = 8, b""
    while kind != b"IEND":
        kind = data[position + 4 : position + 8]
        if kind not in _PLAIN_CHUNKS:
            return False
        position += 12 + int.from_bytes(data[position : position + 4])
    return position <= len(data) and b"Raw profile type" not in data  # EXIF as text, from ImageMagick


def _webp(data: bytes) -> Header:
    """Size and flags are read here: Pillow allocates two canvases when it opens a WebP file."""
    kind, payload = data[12:16], data[20:30]
    plain = len(data) >= int.from_bytes(data[4:8], "little") + _RIFF_BYTES
    if len(payload) < 10:
        raise RefusedImageError("a truncated WebP header")
    if kind == b"VP8 ":
        width, height = (int.from_bytes(payload[at : at + 2], "little") & 0x3FFF for at in (6, 8))
    elif kind == b"VP8L":
        bits = int.from_bytes(payload[1:5], "little")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        plain = plain and not bits >> 28 & 1  # alpha
    elif kind == b"VP8X":
        width, height = (int.from_bytes(payload[at : at + 3], "little") + 1 for at in (4, 7))
        plain = plain and not payload[0] & 0b0001_1110  # alpha, EXIF, XMP, animation
    else:
        raise RefusedImageError(f"a WebP file whose first chunk is {kind!r}")
    check_pixels((height, width))
    image = WebPImageFile(io.BytesIO(data))
    return Header(image, _size(image), plain)


def _size(image: Image.Image) -> Size:
    size = image.height, image.width
    check_pixels(size)
    return size
