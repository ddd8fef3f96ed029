"""Kinds of picture files, by their first bytes and by the ending of their names.

The first bytes decide: a JPEG is one under every name. The endings only spare the listing of a folder the opening of
every file.
"""

import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

HEAD = 64
"""Bytes of a file that tell its kind."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of picture files.

    Attributes:
        name: Name in messages.
        endings: Endings of file names, in lower case, without the dot.
        signature: Pattern of the first bytes; None: only the ending tells.
        taken: Whether the decoders read it.
        on_tiff: Whether its files begin as a TIFF, so that the ending decides.
    """

    name: str
    endings: frozenset[str]
    signature: re.Pattern[bytes] | None
    taken: bool = False
    on_tiff: bool = False


def _kind(name: str, endings: str, signature: bytes | None = None, **more: bool) -> Kind:
    pattern = None if signature is None else re.compile(signature, re.DOTALL)
    return Kind(name, frozenset(endings.split()), pattern, **more)


def _reads_avif() -> bool:
    from PIL import features

    return bool(features.check("avif"))


JPEG = _kind("JPEG", "jpg jpeg jpe jfif jif pjpeg pjp mpo", rb"\xff\xd8\xff", taken=True)
PNG = _kind("PNG", "png apng", rb"\x89PNG\r\n\x1a\n", taken=True)
WEBP = _kind("WebP", "webp", rb"RIFF.{4}WEBP", taken=True)
GIF = _kind("GIF", "gif", rb"GIF8[79]a", taken=True)
BMP = _kind("BMP", "bmp dib", rb"BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\0{3}", taken=True)
TIFF = _kind("TIFF", "tif tiff", rb"II[*+]\0|MM\0[*+]", taken=True)
AVIF = _kind("AVIF", "avif avifs", rb".{4}ftyp(avi[fs]|m(if|sf)1.{4,44}avi[fs])", taken=_reads_avif())

_ISO = rb".{4}ftyp"
KINDS = (
    JPEG,
    PNG,
    WEBP,
    GIF,
    BMP,
    AVIF,
    _kind("HEIC", "heic heif hif heics heifs", _ISO + rb"(hei[cxms]|hev[cxms]|m(if|sf)1)"),
    _kind("JPEG XL", "jxl", rb"\xff\x0a|\0{3}\x0cJXL \r\n\x87\n"),
    _kind("JPEG 2000", "jp2 j2k jpf jpx j2c jpc", rb"\0{3}\x0cjP  \r\n\x87\n|\xff\x4f\xff\x51"),
    _kind("SVG", "svg svgz", rb"(\xef\xbb\xbf)?\s*<svg[\s>]"),
    _kind("Photoshop", "psd psb", rb"8BPS"),
    _kind("GIMP", "xcf", rb"gimp xcf"),
    _kind(
        "camera raw",
        "dng nef nrw cr2 arw srf sr2 pef srw raw 3fr erf kdc dcr mef mos iiq rwl cr3 crw raf rw2 orf x3f",
        rb"II\*\0.{4}CR|" + _ISO + rb"crx|FUJIFILMCCD-RAW|IIU\0|IIR[OS]|MMOR|II\x1a\0\0\0HEAPCCDR|FOVb",
        on_tiff=True,
    ),
    TIFF,  # after the kinds that begin as a TIFF
    _kind("OpenEXR", "exr", rb"v/1\x01"),
    _kind("Radiance HDR", "hdr", rb"#\?R(ADIANCE|GBE)\n"),
    _kind("DDS", "dds", rb"DDS \x7c\0{3}"),
    _kind("QOI", "qoi", rb"qoif"),
    _kind("PNM", "ppm pgm pbm pnm pfm", rb"P[1-7Ff]\s[#\s\d.-]"),
    _kind("icon", "ico cur icns", rb"icns|\0\0[\1\2]\0[\1-\xff]\0.{14}"),
    _kind("TGA", "tga"),
    _kind("PCX", "pcx"),
    _kind("vector drawing", "eps ai wmf emf"),
    _kind("DICOM", "dcm"),
)
"""All known kinds; the signature of the first that fits decides."""

TAKEN = frozenset(ending for kind in KINDS if kind.taken for ending in kind.endings)
"""Endings of the kinds that are read."""
USUAL = frozenset({"jpg", "jpeg", "png", "webp"})
"""Endings of the kinds in most data sets: one such file is the image of a sample with several."""
ENDINGS = {ending: kind for kind in KINDS for ending in kind.endings}
"""The kind that each ending promises."""
READ = ", ".join(kind.name for kind in (JPEG, PNG, WEBP, GIF, BMP, TIFF, AVIF) if kind.taken)
"""The kinds that are read, for messages."""

_TEXTS = (
    "txt caption captions tags cap text json jsonl csv tsv xml yaml yml toml md rst html htm log cls py ipynb sh ini"
)
_ARRAYS = "npy npz pt pth ckpt safetensors pkl parquet arrow feather h5 hdf5 lmdb db"
_ARCHIVES = "gz tgz zst zip 7z rar bz2 xz"
_OTHERS = "tar pdf exe dll lnk url"
_FILMS = "mp4 mov avi mkv webm m4v 3gp mp3 wav flac aac m4a aae"
_NO_PICTURES = frozenset(ending for group in (_TEXTS, _ARRAYS, _ARCHIVES, _OTHERS, _FILMS) for ending in group.split())
"""Endings that promise no picture; such files are not opened."""


def ending_of(name: str) -> str:
    """Return the ending of a file name in lower case, without the dot; empty if it has none."""
    return os.path.splitext(name)[1][1:].lower()


def kind_of_bytes(head: bytes) -> Kind | None:
    """Return the kind that the first bytes of a file show."""
    return next((kind for kind in KINDS if kind.signature and kind.signature.match(head)), None)


def kind_of_name(name: str) -> Kind | None:
    """Return the kind that the ending of a name promises."""
    return ENDINGS.get(ending_of(name))


def kind_of_file(name: str, head: Callable[[], bytes]) -> Kind | None:
    """Return the kind of a file; None: it looks like no picture.

    Args:
        name: Its name. Under an ending of a kind that is read, the decoder looks at the bytes later.
        head: Returns its first ``HEAD`` bytes; called only where the ending leaves a doubt.
    """
    ending = ending_of(name)
    promised = ENDINGS.get(ending)
    if promised is not None and promised.taken:
        return promised
    if promised is None and ending in _NO_PICTURES:
        return None
    found = kind_of_bytes(head())
    if found is None or (promised is not None and promised.on_tiff and found is TIFF):
        return promised
    return found


def head_of(path: str) -> bytes:
    """Return the first ``HEAD`` bytes of a regular file; empty if it is none or cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # without waiting for a pipe's writer
    except OSError:
        return b""
    try:
        return os.read(descriptor, HEAD) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    except OSError:
        return b""
    finally:
        os.close(descriptor)


@cache
def not_read(kind: Kind) -> str:
    """Return the reason for which pictures of a kind are left out."""
    return f"of kind {kind.name}, which is not read (convert to JPEG or PNG)"


UNPACKED = "archives, not read (only .tar is): unpack them"
"""Why they are no data."""


def is_archive(name: str) -> bool:
    """Return whether a file of this name is an archive that is not read."""
    return ending_of(name) in _ARCHIVES.split()
