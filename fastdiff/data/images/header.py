"""Headers of image files: format, size, and whether all decoders give equal pixels.

Pixels are neither decoded nor allocated, so that a decompression bomb is refused at no cost.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass

from PIL import ExifTags, Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from fastdiff.data.images.geometry import Size, area
from fastdiff.data.images.kinds import AVIF, BMP, GIF, HEAD, JPEG, PNG, READ, TIFF, WEBP, Kind, kind_of_bytes

MAX_PIXELS = 2**27
"""Largest image before and after the resize, for example 11,585 x 11,585 or 20,000 x 6,710; 0.5 GB in Pillow."""

MAX_SCANS = 256
"""Largest number of scans of a progressive JPEG. Each scan costs a pass over the whole image, however short it is;
encoders write about ten."""

_RIFF_BYTES = 8  # bytes not counted by the length in a RIFF header
_JPEG_TAIL = 4096  # search range of the end marker: some programs append data
_PLAIN_CHUNKS = {b"IHDR", b"IDAT", b"IEND", b"tEXt", b"tIME", b"pHYs", b"gAMA", b"cHRM", b"sRGB", b"iCCP", b"sBIT"}


class RefusedImageError(ValueError):
    """An image is refused; the message gives the reason."""


@dataclass(frozen=True)
class Header:
    """The header of an image.

    Attributes:
        image: The image, opened by Pillow but not decoded.
        size: Height and width in pixels as stored, before any EXIF rotation.
        plain: True for a complete, upright 8-bit grey or RGB image, alone in its file: all decoders give equal pixels.
            All other images are decoded by Pillow.
    """

    image: Image.Image
    size: Size
    plain: bool


def read_header(data: bytes) -> Header:
    """Read the header of a picture, whatever its name; of an animation or a file of several pages, of the first one.

    ICC profiles are ignored here and by all decoders: pixels count as sRGB. RefusedImageError: the kind is not read,
    the file is empty or damaged, has more than ``MAX_PIXELS`` pixels, is a progressive JPEG with more than
    ``MAX_SCANS`` scans, or a TIFF without a range of levels.
    """
    if not data:
        raise RefusedImageError("an empty file (0 bytes)")
    kind = _kind(data)
    try:
        return _READERS[kind](data)
    except (RefusedImageError, MemoryError):
        raise
    except Exception as error:  # on damaged bytes Pillow raises nearly anything
        raise RefusedImageError(f"a damaged {kind.name} file: {describe(error)}") from error


def check_pixels(size: Size, what: str = "") -> None:
    """Raise RefusedImageError for more than ``MAX_PIXELS`` pixels; ``what`` names the operation."""
    if area(size) > MAX_PIXELS:
        raise RefusedImageError(f"{size[1]}x{size[0]} pixels{what}, more than {MAX_PIXELS} in total")


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 (upright) if it is missing or unreadable."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # as in read_header; the pixels may still be intact
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def describe(error: Exception) -> str:
    """Describe an exception of a decoder in one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _kind(data: bytes) -> Kind:
    """Return the kind by signature, never by file name."""
    kind = kind_of_bytes(data[:HEAD])
    if kind is not None and kind.taken:
        return kind
    if kind is not None:
        raise RefusedImageError(f"a {kind.name} file by its first bytes; convert it to JPEG or PNG")
    raise RefusedImageError(f"no picture of a kind that is read ({READ}): it starts with {data[:12]!r}")


def _jpeg(data: bytes) -> Header:
    # Not Image.open, which has its own size limit and searches files for further images (MPO).
    image = JpegImageFile(io.BytesIO(data))
    size = _size(image)
    if image.info.get("progressive") and (scans := data.count(b"\xff\xda")) > MAX_SCANS:
        raise RefusedImageError(f"a progressive JPEG of {scans} scans, more than {MAX_SCANS}")
    plain = _is_grey_or_ycbcr(image) and b"\xff\xd9" in data[-_JPEG_TAIL:] and orientation(image) == 1
    return Header(image, size, plain)


def _is_grey_or_ycbcr(image: JpegImageFile) -> bool:
    """Return True only if component ids and Adobe's marker prove that the JPEG is grey or YCbCr, not RGB."""
    if image.mode == "RGB":
        return [component[0] for component in image.layer] == [1, 2, 3] and image.info.get("adobe_transform") != 0
    return image.mode == "L"


def _png(data: bytes) -> Header:
    image = PngImageFile(io.BytesIO(data))
    depth, color = data[24], data[25]
    grey_or_rgb = depth == 8 and color in (0, 2)
    return Header(image, _size(image), grey_or_rgb and _has_plain_chunks(data))


def _has_plain_chunks(data: bytes) -> bool:
    """Return whether a PNG is complete, without transparency, animation and EXIF."""
    position, kind = 8, b""
    while kind != b"IEND":
        kind = data[position + 4 : position + 8]
        if kind not in _PLAIN_CHUNKS:
            return False
        position += 12 + int.from_bytes(data[position : position + 4])
    return position <= len(data) and b"Raw profile type" not in data  # EXIF as text, from ImageMagick


def _webp(data: bytes) -> Header:
    """Parse size and flags before Pillow opens the file, as Pillow then allocates two canvases."""
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


def _tiff(data: bytes) -> Header:
    image = TiffImageFile(io.BytesIO(data))
    size = _size(image)
    if image.mode in ("F", "I"):
        raise RefusedImageError(
            f"a TIFF of {'floating-point' if image.mode == 'F' else '32-bit or signed'} levels, whose range is not "
            "known; convert it to 8 or 16 bits"
        )
    return Header(image, size, plain=False)


def _by(opened: Callable[[io.BytesIO], Image.Image]) -> Callable[[bytes], Header]:
    def read(data: bytes) -> Header:
        image = opened(io.BytesIO(data))
        return Header(image, _size(image), plain=False)

    return read


def _avif(data: bytes) -> Header:
    from PIL.AvifImagePlugin import AvifImageFile  # since Pillow 11.3

    return _by(AvifImageFile)(data)


_READERS: dict[Kind, Callable[[bytes], Header]] = {
    JPEG: _jpeg,
    PNG: _png,
    WEBP: _webp,
    GIF: _by(GifImageFile),
    BMP: _by(BmpImageFile),
    TIFF: _tiff,
    AVIF: _avif,
}
