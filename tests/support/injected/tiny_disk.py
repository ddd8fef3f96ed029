"""A file system that fills up soon: a real one if this user may mount it, otherwise a stand-in."""

import _pyio
import builtins
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
from safetensors import SafetensorError

from fastdiff import buffered_writes


@contextmanager
def tiny_disk(folder: Path, megabytes: float, *, inodes: int = 0, stand_in: bool | None = None) -> Iterator[Path]:
    """Make ``folder`` a file system of this many MiB (2**20 bytes) while the context lasts.

    Mounting a tmpfs needs CAP_SYS_ADMIN, which root has outside most containers. Everyone else gets a stand-in for code
    that runs in this process: ``open``, ``os.write``, ``shutil.disk_usage``, ``fastdiff.files.reserve``,
    ``fastdiff.buffered_writes.mount_point`` and safetensors' ``save_file`` behave in ``folder`` as on a disk of that
    size, and fail with the same errors as on a tmpfs. Other writers, such as a subprocess, see no limit there.

    Args:
        folder: Made if it is missing; it should be empty.
        megabytes: Size.
        inodes: Number of files and folders that it holds, itself included; 0: no limit.
        stand_in: None: only where mounting is not possible; True or False: this way and no other.

    Yields:
        ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    size = int(megabytes * 2**20)
    if not stand_in and _mount(folder, size, inodes):
        try:
            yield folder
        finally:
            # Lazy: a file that the test left open must not keep the mount in the test's folder.
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        return
    if stand_in is False:
        raise PermissionError(f"cannot mount a tmpfs at {folder}")
    with _StandIn(folder, size, inodes).patched():
        yield folder


def fill(disk: Path) -> None:
    """Leave not a byte on a disk, by a file ``ballast``."""
    with (disk / "ballast").open("ab", buffering=0) as ballast:
        for size in (2**20, 2**12, 1):
            with suppress(OSError):
                while True:
                    ballast.write(bytes(size))


def _mount(folder: Path, size: int, inodes: int) -> bool:
    options = f"size={size}" + (f",nr_inodes={inodes}" if inodes else "")
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


class _StandIn:
    """Counts what lies in a folder, and refuses to let it grow beyond its size."""

    def __init__(self, folder: Path, size: int, inodes: int) -> None:
        self.folder, self.size, self.inodes = folder.absolute(), size, inodes
        self._mkdir = os.mkdir
        self._open, self._write = builtins.open, os.write
        self._mount_point = buffered_writes.mount_point
        self._disk_usage, self._serialize = shutil.disk_usage, safetensors.torch.serialize_file

    @contextmanager
    def patched(self) -> Iterator[None]:
        with ExitStack() as stack:
            # Python's own open makes its files in C; _pyio's write with os.write, which can be replaced.
            for name in ("builtins.open", "io.open"):
                stack.enter_context(mock.patch(name, self.open))
            stack.enter_context(mock.patch("os.write", self.write))
            stack.enter_context(mock.patch("os.mkdir", self.mkdir))
            stack.enter_context(mock.patch("fastdiff.files.reserve", self.reserve))
            stack.enter_context(mock.patch("fastdiff.buffered_writes.mount_point", self.mount_point))
            stack.enter_context(mock.patch("shutil.disk_usage", self.disk_usage))
            stack.enter_context(mock.patch("safetensors.torch.serialize_file", self.serialize_file))
            yield

    def free(self) -> int:
        used = 0
        for folder, _, names in os.walk(self.folder):
            for name in names:
                with suppress(FileNotFoundError):  # a thread has just removed it
                    used += os.stat(os.path.join(folder, name)).st_size
        return max(0, self.size - used)

    def holds(self, path: object) -> bool:
        return isinstance(path, str | os.PathLike) and Path(path).absolute().is_relative_to(self.folder)

    def open(self, file: Any, *args: Any, **options: Any) -> Any:
        return (_pyio.open if self.holds(file) else self._open)(file, *args, **options)

    def write(self, descriptor: int, data: Any) -> int:
        if self.holds(os.readlink(f"/proc/self/fd/{descriptor}")):
            view = memoryview(data).cast("B")
            data = view[: self.free()]  # as a disk does it: first what fits, then the error
            if len(view) and not len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(descriptor, data)

    def mkdir(self, path: Any, *args: Any, **options: Any) -> None:
        used = 1 + sum(len(folders) + len(names) for _, folders, names in os.walk(self.folder))
        if self.inodes and self.holds(path) and used >= self.inodes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        self._mkdir(path, *args, **options)

    def reserve(self, descriptor: int, size: int) -> None:
        if self.holds(os.readlink(f"/proc/self/fd/{descriptor}")) and size > self.free():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def mount_point(self, path: Path) -> Path:
        return self.folder if self.holds(path) else self._mount_point(path)

    def disk_usage(self, path: Any) -> Any:
        if not self.holds(path):
            return self._disk_usage(path)
        free = self.free()
        return type(self._disk_usage("/"))(self.size, self.size - free, free)

    def serialize_file(self, tensors: Any, filename: Any, **options: Any) -> None:
        """Write all, which does no harm on the real disk below, and take it back if it would not have fitted."""
        free = self.free()
        self._serialize(tensors, filename, **options)
        if self.holds(filename) and Path(filename).stat().st_size > free:
            Path(filename).unlink()
            reason = f"I/O error: {os.strerror(errno.ENOSPC)} (os error {errno.ENOSPC})"
            raise SafetensorError(f"Error while serializing: {reason}")
