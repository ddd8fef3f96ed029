"""Image files for tests: sound ones of every kind, and broken ones."""

import io
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

Array = npt.NDArray[Any]
Chunk = tuple[bytes, bytes]


def natural(height: int, width: int, seed: int = 0) -> Array:
    """RGB pixels `[H, W, 3]` uint8 with the 1/f spectrum of photographs."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf
    spectrum = np.fft.rfft2(rng.standard_normal((3, height, width))) / frequency
    planes = np.fft.irfft2(spectrum, (height, width))
    planes /= max(planes.std(), 1e-9)
    mixed = 0.5 * planes + planes.mean(0)  # the channels of a photograph are alike
    return np.clip(128 + 48 * mixed, 0, 255).astype(np.uint8).transpose(1, 2, 0).copy()


def encode(pixels: Array, kind: str, **options: Any) -> bytes:
    """An image file by Pillow, converted to `mode` before."""
    image = Image.fromarray(pixels)
    mode = options.pop("mode", None)
    buffer = io.BytesIO()
    (image.convert(mode) if mode else image).save(buffer, kind, **options)
    return buffer.getvalue()


def with_orientation(pixels: Array, kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(pixels, kind, exif=exif)


def animated(kind: str, frames: Sequence[Array]) -> bytes:
    first, *others = (Image.fromarray(frame) for frame in frames)
    buffer = io.BytesIO()
    first.save(buffer, kind, save_all=True, append_images=others, lossless=True)
    return buffer.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    """A PNG chunk with its CRC."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    width: int,
    height: int,
    depth: int,
    color: int,
    packed: bytes,
    *,
    before: Sequence[Chunk] = (),
    after: Sequence[Chunk] = (),
) -> bytes:
    """A PNG file of already deflated rows, with chunks before and after its pixels."""
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    chunks = [(b"IHDR", header), *before, (b"IDAT", packed), *after, (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks)


def png_of(pixels: Array, *, before: Sequence[Chunk] = (), after: Sequence[Chunk] = ()) -> bytes:
    """Grey `[H, W]` or colour `[H, W, 3]`, uint8 or uint16, as an unfiltered PNG."""
    height, width = pixels.shape[:2]
    big = pixels.astype(pixels.dtype.newbyteorder(">"))
    rows = b"".join(b"\0" + row.tobytes() for row in big)
    color = 0 if pixels.ndim == 2 else 2
    return png(width, height, 8 * pixels.itemsize, color, zlib.compress(rows), before=before, after=after)


def empty_png(width: int, height: int) -> bytes:
    """A black one-bit PNG that is about a thousand times smaller than its rows: a decompression bomb."""
    pack = zlib.compressobj(9)
    row = bytes(1 + (width + 7) // 8)
    packed = b"".join(pack.compress(row * 100) for _ in range(height // 100)) + pack.compress(row * (height % 100))
    return png(width, height, 1, 0, packed + pack.flush())


def jpeg_claiming(width: int, height: int) -> bytes:
    """A JPEG whose header says another size than its data has."""
    data = bytearray(encode(natural(16, 16), "JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def webp_claiming(width: int, height: int) -> bytes:
    """A lossless WebP whose header says another size than its data has."""
    data = bytearray(encode(natural(16, 16), "WebP", lossless=True))
    assert data[12:16] == b"VP8L"
    data[21:25] = struct.pack("<I", (width - 1) | (height - 1) << 14)
    return bytes(data)


def jpeg_of_scans(scans: int) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    data = encode(natural(32, 32), "JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * scans + data[-2:]


def damaged(data: bytes, part: float = 0.5) -> bytes:
    """Thirty bytes in the middle turned over."""
    changed = bytearray(data)
    at = int(len(data) * part)
    changed[at : at + 30] = (byte ^ 0x55 for byte in changed[at : at + 30])
    return bytes(changed)


SIDE = 64
PIXELS = natural(SIDE, SIDE)
_EXIF_BEHIND = b"II*\0\x08\0\0\0\x01\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0"  # orientation 6

PLAIN = {
    "jpeg": encode(PIXELS, "JPEG"),
    "jpeg 4:4:4": encode(PIXELS, "JPEG", subsampling=0),
    "jpeg progressive": encode(PIXELS, "JPEG", progressive=True),
    "jpeg grey": encode(PIXELS[..., 0], "JPEG"),
    "jpeg broken exif": encode(PIXELS, "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\x7f" + b"\xff" * 20),
    "jpeg mpo": encode(PIXELS, "MPO", save_all=True, append_images=[Image.fromarray(PIXELS[::-1])]),
    "png": encode(PIXELS, "PNG"),
    "png grey": encode(PIXELS[..., 0], "PNG"),
    "png gamma": png_of(PIXELS, before=[(b"gAMA", b"\0\0\x75\x30"), (b"sBIT", b"\5\5\5")]),
    "png text": png_of(PIXELS, before=[(b"tEXt", b"k\0" + b"A" * 12_000_000)]),
    "webp": encode(PIXELS, "WebP"),
    "webp lossless": encode(PIXELS, "WebP", lossless=True),
}
SPECIAL = {
    "jpeg rgb": encode(PIXELS, "JPEG", keep_rgb=True),
    "jpeg cmyk": encode(PIXELS, "JPEG", mode="CMYK", quality=95),
    "png rgba": encode(np.dstack([PIXELS, PIXELS[..., :1]]), "PNG"),
    "png grey alpha": encode(PIXELS, "PNG", mode="LA"),
    "png palette": encode(PIXELS, "PNG", mode="P"),
    "png palette transparent": encode(PIXELS, "PNG", mode="P", transparency=bytes(range(256))),
    "png bit": encode(PIXELS, "PNG", mode="1"),
    "png exif behind": png_of(PIXELS, after=[(b"eXIf", _EXIF_BEHIND)]),
    "png animated": animated("PNG", [PIXELS, PIXELS[::-1].copy()]),
    "webp alpha": encode(np.dstack([PIXELS, PIXELS[..., :1]]), "WebP", lossless=True, exact=True),
    "webp animated": animated("WebP", [PIXELS, PIXELS[::-1].copy()]),
    **{f"jpeg exif {n}": with_orientation(natural(SIDE, 96), "JPEG", n) for n in range(2, 9)},
    "webp exif": with_orientation(PIXELS, "WebP", 6),
    "gif animated": animated("GIF", [PIXELS, PIXELS[::-1].copy()]),
    "bmp": encode(PIXELS, "BMP"),
    "bmp palette": encode(PIXELS, "BMP", mode="P"),
    "avif": encode(PIXELS, "AVIF"),
    "avif exif": with_orientation(PIXELS, "AVIF", 6),
    "tiff": encode(PIXELS, "TIFF"),
    "tiff lzw": encode(PIXELS, "TIFF", compression="tiff_lzw"),
    "tiff cmyk": encode(PIXELS, "TIFF", mode="CMYK"),
    "tiff alpha": encode(np.dstack([PIXELS, PIXELS[..., :1]]), "TIFF"),
    "tiff of pages": animated("TIFF", [PIXELS, PIXELS[::-1].copy()]),
    **{f"tiff exif {n}": with_orientation(natural(SIDE, 96), "TIFF", n) for n in (3, 6)},
}  # fmt: skip
