"""Headers of a foreign tar, without trust in what they say.

Python's tarfile ends silently at a header that is damaged or missing, and reads an extended header into memory whatever
its size is said to be; here both are errors.
"""

from __future__ import annotations

import tarfile
from typing import Self

# Headers whose contents tarfile reads into memory whatever their size is said to be.
_EXTENSIONS = {
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
}
_LARGEST_EXTENSION = 1 << 20


class StrictHeader(tarfile.TarInfo):
    """A header of a tar; the only thing that may stand in its place is the block of zeros that ends an archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """A header from its 512 bytes; ReadError if its size lies."""
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0:
            raise tarfile.ReadError("a header with a negative size")
        if header.type in _EXTENSIONS and header.size > _LARGEST_EXTENSION:
            raise tarfile.ReadError(f"an extended header of {header.size} bytes; at most {_LARGEST_EXTENSION}")
        return header

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> Self:
        """The next header of a tar; ReadError if there is something else."""
        try:
            header = super().fromtarfile(tarfile_)
        except tarfile.HeaderError as error:
            if type(error).__name__ == "EOFHeaderError":
                raise
            raise tarfile.ReadError(str(error)) from None
        if header.size < 0:
            raise tarfile.ReadError("a header with a negative size")  # of an extended header
        return header
