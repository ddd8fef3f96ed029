"""A process that dies at a chosen file operation, and the state of the disk after a power cut at that moment."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from fastdiff import files

Operation = dict[str, Any]
"""``op``, ``path``, ``at`` (monotonic nanoseconds); of a rename also ``to``, of an fsync or a write the ``size``."""

LOSSES = ("truncated", "zeroed", "unnamed")
"""Effects of a power cut on everything that was not fsynced: contents cut off, contents zeroed, names as before."""


class CrashPoints:
    """Numbered operations of this process that change the disk below a folder.

    Args:
        folder: operations below it count.
        journal: file with the operations done so far, readable after a kill too.
        die_at: number of the operation at which the process kills itself, a write half done, or a function that
            returns True for it; None: it survives.
    """

    def __init__(self, folder: Path, journal: Path, die_at: int | Callable[[Operation], bool] | None = None) -> None:
        self.done = 0
        self._folder, self._die_at = str(folder.absolute()), die_at
        self._write = os.write
        self._journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch every call of these functions while the context lasts."""
        names = ("mkdir", "rename", "replace", "unlink", "rmdir")
        patches = [mock.patch.object(os, name, self._named(name)) for name in names]
        patches += [mock.patch.object(os, name, self._on_descriptor(name)) for name in ("write", "fsync")]
        patches += [mock.patch("os.open", self._open()), mock.patch.object(files, "reserve", self._reserve())]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in reversed(patches):
                patch.stop()
            os.close(self._journal)

    def _named(self, name: str) -> Callable[..., Any]:
        original = getattr(os, name)

        def call(path: Any, *args: Any, dir_fd: int | None = None, **options: Any) -> Any:
            full = os.path.join(_target(dir_fd), path) if dir_fd is not None else os.path.abspath(path)
            given = options if dir_fd is None else {**options, "dir_fd": dir_fd}
            record = {"op": name, "path": full}
            if name in ("rename", "replace"):
                record |= {"op": "rename", "to": os.path.abspath(args[0])}
            return self._do(record, lambda: original(path, *args, **given))

        return call

    def _on_descriptor(self, name: str) -> Callable[..., Any]:
        original = getattr(os, name)

        def call(descriptor: int, *args: Any) -> Any:
            record = {"op": name, "path": _target(descriptor), "size": os.fstat(descriptor).st_size}
            half = [memoryview(data)[: len(data) // 2] for data in args]
            return self._do(record, lambda: original(descriptor, *args), lambda: half and original(descriptor, *half))

        return call

    def _open(self) -> Callable[..., int]:
        original = os.open

        def call(path: Any, flags: int, *args: Any, **options: Any) -> int:
            if flags & os.O_CREAT:
                return self._do(
                    {"op": "create", "path": os.path.abspath(path)}, lambda: original(path, flags, *args, **options)
                )
            return original(path, flags, *args, **options)

        return call

    def _reserve(self) -> Callable[[int, int], None]:
        original = files.reserve
        return lambda descriptor, size: self._do(
            {"op": "reserve", "path": _target(descriptor)}, lambda: original(descriptor, size)
        )

    def _do(self, record: Operation, action: Callable[[], Any], half: Callable[[], Any] = lambda: None) -> Any:
        if not record["path"].startswith(self._folder):
            return action()
        if self._die_at(record) if callable(self._die_at) else self.done == self._die_at:
            half()
            self._note(record)
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        self.done += 1
        result = action()
        self._note(record)
        return result

    def _note(self, record: Operation) -> None:
        self._write(self._journal, (json.dumps({**record, "at": time.monotonic_ns()}) + "\n").encode())


def _target(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}").removesuffix(" (deleted)")


def operations(journals: Sequence[Path]) -> list[Operation]:
    """Return the operations of several processes in order, with the one at which a process died."""
    found = [json.loads(line) for journal in journals for line in journal.read_text().splitlines()]
    return sorted(found, key=lambda record: record["at"])


def cut_power(folder: Path, done: Sequence[Operation], loss: str) -> None:
    """Undo everything that no fsync had made durable.

    Args:
        folder: a copy of the folder that was watched; the journals name its original by absolute paths.
        done: all operations since everything was on the disk.
        loss: one of ``LOSSES``.
    """
    if loss == "unnamed":
        _undo_names(folder, done)
        return
    synced: dict[str, int] = {}
    written: set[str] = set()
    for record in done:
        path = record["path"]
        if record["op"] == "create":
            synced[path] = 0
        elif record["op"] == "write":
            written.add(path)
        elif record["op"] == "fsync" and path in synced:
            synced[path] = record["size"]
            written.discard(path)
        elif record["op"] == "rename":
            old, new = path + "/", record["to"] + "/"
            synced = {name.replace(old, new, 1): size for name, size in synced.items()}
            written = {name.replace(old, new, 1) for name in written}
    for name in written:
        path = folder / os.path.relpath(name, _root(folder, name))
        if path.exists():
            size = path.stat().st_size
            os.truncate(path, synced[name])
            if loss == "zeroed":
                os.truncate(path, size)


def _undo_names(folder: Path, done: Sequence[Operation]) -> None:
    unsure: list[Operation] = []
    for record in done:
        if record["op"] == "fsync":
            unsure = [r for r in unsure if os.path.dirname(r["path"]) != record["path"]]
        elif record["op"] in ("create", "mkdir", "rename"):
            unsure.append(record)
    for record in reversed(unsure):
        path = folder / os.path.relpath(record["path"], _root(folder, record["path"]))
        if record["op"] == "rename":
            moved = path.with_name(os.path.basename(record["to"]))
            if moved.exists() and not path.exists():
                moved.rename(path)
        elif path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()


def _root(folder: Path, name: str) -> str:
    """The folder in which the operation was done: of the same name as the copy."""
    return name[: name.index(f"/{folder.name}/") + len(folder.name) + 1]
