"""Remote files over ``http``, ``https`` and ``s3`` (fsspec), read completely even if connections drop.

After a lost connection, a range request resumes at the next byte. The length stated by the server decides where a file
ends, never the end of a connection. Messages show the address without user, password and query, which may hold secrets.
"""

from __future__ import annotations

import hashlib
import io
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import SplitResult, urlsplit, urlunsplit

from fastdiff import sanitize
from fastdiff.errors import ConfigError, DataError, StorageError
from fastdiff.files import rename, temporary
from fastdiff.optional_packages import pip_install

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

T = TypeVar("T")

_ATTEMPTS = 5
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds
_SILENCE = 60.0  # seconds without data after which a connection counts as dropped
_BUFFER = 1 << 20
_PASSING = {408, 425, 429}  # transient client errors of HTTP


class _Changed(Exception):
    """The file changed during the read."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """An open response with the bytes of a file from ``start`` on."""

    read: Callable[[int], bytes]
    close: Callable[[], object]
    start: int
    size: int | None
    """Bytes of the whole file; None: unknown."""
    tag: str | None
    """ETag; it changes with the file."""


def is_remote(text: str) -> bool:
    """Return whether ``text`` is an address that this module can read."""
    return re.match(r"(https?|s3)://", text, re.IGNORECASE) is not None


def shown(url: str) -> str:
    """Return an address for messages and provenance: without user, password and query."""
    return sanitize.address(url)


def resource(url: str) -> str:
    """Return what identifies a file: its address without user, password, query and fragment; ConfigError if invalid."""
    parts = _parts(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def join(url: str, name: str) -> str:
    """Return the address of a file in a folder, with its query, which may be a signature; ConfigError if invalid."""
    parts = _parts(url)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}"))


def _parts(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"{shown(url)}: not an address ({error}); expected for example https://host/folder") from None


def open_url(url: str, most: int | None = None) -> io.BufferedReader:
    """Open a file for sequential reading, without seek.

    Args:
        url: Address of the file.
        most: Largest allowed number of bytes; None: no limit, for files read in pieces.

    Raises:
        ConfigError: A package for this kind of address is not installed.
        StorageError: Here and from every read: the file does not exist or cannot be accessed, the server states no
            length, the file changed during the read, or the connection failed five times in a row.
        DataError: The file has more bytes than ``most``.
    """
    file = _RemoteFile(url)
    if most is not None and file.size > most:
        file.close()
        raise DataError(
            f"{shown(url)} has {file.size} bytes, expected at most {most}: it is a different file; check the address, "
            "or restore it at its source"
        )
    return io.BufferedReader(file, _BUFFER)


def fetch(url: str, target: Path, sha256: str | None, most: int | None = None) -> None:
    """Download a file, verify it and publish it at ``target`` atomically.

    It is written to a temporary name in the same folder; two threads of a process must not fetch the same target.

    Args:
        url: Address of the file.
        target: Final path.
        sha256: Expected digest; None: unknown.
        most: As for ``open_url``.

    Raises:
        ConfigError: As ``open_url``.
        DataError: The sha256 differs, or the file has more bytes than ``most``.
        StorageError: The file cannot be read (as ``open_url``) or written.
    """
    digest = hashlib.sha256()
    with open_url(url, most) as source:
        try:
            with temporary(target).open("wb") as file:
                while block := source.read(_BUFFER):
                    digest.update(block)
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
            if sha256 not in (None, digest.hexdigest()):
                raise DataError(
                    f"{shown(url)} has the sha256 {digest.hexdigest()}, expected {sha256}: it is damaged or from "
                    "another encode; restore it at its source"
                )
            rename(temporary(target), target)
        except OSError as error:
            raise StorageError(
                f"cannot write {error.filename or target}: {error.strerror or error}; free some space or choose "
                f"another folder for the downloads from {shown(url)}"
            ) from error
        finally:
            temporary(target).unlink(missing_ok=True)


def list_folder(url: str) -> list[str]:
    """Return the sorted addresses of the files in an S3 folder.

    Raises:
        ConfigError: The address is http, which cannot list folders, or s3fs is missing.
        StorageError: The folder cannot be listed.
    """
    if not url.lower().startswith("s3:"):
        raise ConfigError(f"{shown(url)}: http cannot list folders; name the files, as in {{00000..00099}}.tar")
    system = _filesystem("s3")
    entries: list[dict[str, Any]] = _retried(url, lambda: system.ls(url.rstrip("/"), detail=True))
    return sorted(f"s3://{entry['name']}" for entry in entries if entry["type"] == "file")


class _RemoteFile(io.RawIOBase):
    def __init__(self, url: str) -> None:
        self._url = url
        self._answer: _Answer | None = None
        self._done, self._size = 0, 0
        self._tag: str | None = None
        _retried(url, self._connect)

    @property
    def size(self) -> int:
        """Bytes of the file as stated by the server."""
        return self._size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        wanted = min(len(view), self._size - self._done)
        content = _retried(self._url, lambda: self._read(wanted)) if wanted else b""
        view[: len(content)] = content
        self._done += len(content)
        return len(content)

    def close(self) -> None:
        self._hang_up()
        super().close()

    def _read(self, wanted: int) -> bytes:
        """Read 1 to ``wanted`` bytes; after any failure the next call reconnects."""
        try:
            if self._answer is None:
                self._connect()
            assert self._answer is not None
            content = self._answer.read(wanted)
            if not content:
                raise ConnectionResetError(f"the connection ended after {self._done} of {self._size} bytes")
        except BaseException:
            self._hang_up()
            raise
        return content

    def _connect(self) -> None:
        ask = _ask_s3 if self._url.lower().startswith("s3:") else _ask_http
        self._answer = answer = ask(self._url, self._done)
        if answer.size is None:
            self._hang_up()
            raise StorageError(
                f"cannot read {shown(self._url)}: the server states no length, so a dropped connection would look "
                "like the end of the file; serve it as a plain file with Content-Length"
            )
        if self._done == 0:
            self._size, self._tag = answer.size, answer.tag
        elif (answer.size, answer.tag) != (self._size, self._tag):
            self._hang_up()
            raise _Changed(f"it changed after {self._done} bytes were read")
        behind = self._done - answer.start
        while behind > 0:  # a server without range support restarts at the first byte
            skipped = len(answer.read(min(behind, _BUFFER)))
            behind -= skipped
            if not skipped:
                raise ConnectionResetError(f"the connection ended {behind} bytes before byte {self._done}")
        if behind < 0:
            raise ConnectionResetError(f"the server sent bytes from {answer.start} on, expected {self._done}")

    def _hang_up(self) -> None:
        if self._answer is not None:
            self._answer.close()
            self._answer = None


def _ask_http(url: str, offset: int) -> _Answer:
    # Compression would change offsets and lengths.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={offset}-"} if offset else {})
    # Any given size saves a HEAD request; block_size 0 requests one stream.
    file = _filesystem("http").open(url, block_size=0, size=1, headers=headers)
    found = file.r.headers
    start, size = _extent(found.get("Content-Range"), found.get("Content-Length"))
    return _Answer(file.read, file.close, start, size, found.get("ETag"))


def _ask_s3(url: str, offset: int) -> _Answer:
    from fsspec.asyn import sync

    system = _filesystem("s3")
    bucket, key, _ = system.split_path(url)
    asked = {"Range": f"bytes={offset}-"} if offset else {}
    response = system.call_s3("get_object", Bucket=bucket, Key=key, **asked)
    body = response["Body"]
    start, size = _extent(response.get("ContentRange"), str(response["ContentLength"]))

    def read(count: int) -> bytes:
        return bytes(sync(system.loop, body.read, count))

    def close() -> None:
        system.loop.call_soon_threadsafe(body.close)

    return _Answer(read, close, start, size, response["ETag"])


def _extent(content_range: str | None, content_length: str | None) -> tuple[int, int | None]:
    """Return the offset of a response in its file, and the size of the file."""
    if content_range is None:
        return 0, None if content_length is None else int(content_length)
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", content_range.strip())
    return (int(match[1]), int(match[2])) if match else (0, None)


def _filesystem(kind: str) -> Any:
    """Return fsspec's file system for ``http`` or ``s3``; fsspec caches one per process and set of options."""
    import fsspec

    try:
        if kind == "s3":
            # Only this module retries: with three layers of retries, a server failure would be reported after minutes.
            config = {"retries": {"total_max_attempts": 1}, "connect_timeout": _SILENCE, "read_timeout": _SILENCE}
            # Passed explicitly, although botocore reads it too, so that fsspec caches one file system per server.
            server = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
            system = fsspec.filesystem("s3", endpoint_url=server, config_kwargs=config, use_listings_cache=False)
            system.retries = 1
            return system
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENCE, sock_read=_SILENCE)
        options = {"timeout": timeout, "trust_env": True, "read_bufsize": _BUFFER}
        # Offsets and lengths count transmitted bytes, and a few of these could decompress to gigabytes.
        return fsspec.filesystem("http", client_kwargs=options | {"auto_decompress": False})
    except ImportError as error:
        raise ConfigError(
            f"reading from {kind} needs a package that is not installed ({error}); {pip_install('s3fs', 'aiohttp')}"
        ) from error


def _retried(url: str, action: Callable[[], T]) -> T:
    """Run a network operation with up to five attempts; permanent failures are not retried."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return action()
        except (ConfigError, StorageError):
            raise
        except Exception as error:
            what, remedy = _describe(error)
            if remedy or attempt == _ATTEMPTS:
                tried = f" (tried {attempt} times)" if attempt > 1 else ""
                remedy = remedy or "check the network and the server, then run the same command again"
                # The cause is dropped: its text may hold secrets of the address.
                raise StorageError(f"cannot read {shown(url)}: {what}{tried}; {remedy}") from None
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (attempt - 1))
        time.sleep(pause * random.uniform(0.5, 1))  # jitter: all ranks meet a failure at the same time
    raise AssertionError("unreachable")


def _describe(error: Exception) -> tuple[str, str]:
    """Return the cause of a failure and its remedy; the remedy is empty if a retry may help."""
    status = getattr(error, "status", None)
    if isinstance(error, FileNotFoundError) or status == 404:
        return "it does not exist", "check the address"
    if isinstance(error, PermissionError) or status in (401, 403):
        detail = str(error) if isinstance(error, PermissionError) else f"the server answers {status}"
        return f"access is denied ({detail})", "check the address and the credentials, or sign the address again"
    if isinstance(error, _Changed):
        return str(error), "run the same command again once no other program writes to it"
    if type(error).__name__ == "NoCredentialsError":
        return "there are no credentials", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    if isinstance(status, int):
        passing = status >= 500 or status in _PASSING
        return f"the server answers {status}", "" if passing else "check the address"
    package = type(error).__module__.partition(".")[0]
    if package in ("botocore", "aiobotocore"):
        return str(error), ""
    if not isinstance(error, OSError) and package != "aiohttp":
        return type(error).__name__, "check the address"
    # All other texts may hold the whole address.
    own = isinstance(error, ConnectionResetError) and error.errno is None
    return str(error) if own else getattr(error, "strerror", None) or type(error).__name__, ""
