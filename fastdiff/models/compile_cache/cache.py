"""The compiled code of a run: a folder on this node, in which torch.compile and Triton work, and its pack.

The folder is on a disk of the node, because its many small files and locks are slow on a network, or have no effect
there. The pack is where all nodes see it. A process takes part with ``open_cache``.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastdiff.files import is_temporary, open_lock
from fastdiff.models.compile_cache import pack
from fastdiff.models.compile_cache.compiler import without_compiler
from fastdiff.models.compile_cache.environment import key_of
from fastdiff.plurals import counted
from fastdiff.private_folders import cache_folder, local_folder, private

VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Environment variables of torch and Triton for their folders, and ours."""
_COMPLETE, _LOCK = ".complete", ".lock"
"""Entries of the folder: code of a run that has taken a step is there, and the lock of those who use it."""
_FOLDER = "compiled"
SUFFIX = ".zip"
"""Of the name of a pack."""
_MOST_BYTES, _MOST_FOLDERS = 2**31, 16
"""What packs may take together, and how many folders a node keeps; the least recently used ones are removed."""
_KILLED_S = 3600.0
"""Age of a temporary file that nobody writes any more."""


@dataclass(slots=True)
class Kept:
    """What ``CompileCache.keep`` has done."""

    kernels: int
    size: int
    """Bytes of the pack."""
    removed: int
    """Packs that made room."""


@dataclass(slots=True)
class CompileCache:
    """The folder of a run on this node, and its pack."""

    folder: Path
    pack: Path
    facts: Mapping[str, Any]
    """What the code depends on."""
    source: Path | None = None
    """Where the code came from at the start: the pack, or the folder; None: there was none."""
    problem: str | None = None
    """Why the pack could not be used."""
    _packed: set[str] = field(default_factory=set)

    @property
    def kernels(self) -> int:
        """Compiled kernels in the folder: C++ of torch.compile on a CPU, cubins of Triton."""
        return sum(name.endswith((".main.so", ".cubin")) for name in pack.members(self.folder))

    def complete(self) -> None:
        """Note that a run has taken a step, so its code is whole; nothing if the node has removed the folder."""
        with suppress(OSError):
            (self.folder / _COMPLETE).touch()

    def keep(self) -> Kept | None:
        """Write a pack if there is code that the last one lacks; return what was done.

        Raises:
            OSError: it cannot be written.
            ValueError: it is too large.
        """
        names = pack.members(self.folder)
        if names <= self._packed or _is_compiling(self.folder):  # its files are not whole yet
            return None
        self._packed = names
        size = pack.write(self.pack, self.folder, names, self.facts)
        return Kept(self.kernels, size, _remove_old(self.pack))

    def _fill(self) -> None:
        """Take from the pack what the folder lacks."""
        self.source = self.folder if self.kernels else None
        try:
            if pack.unpack(self.pack, self.folder, self.facts):
                self.source = self.pack
            self._packed = pack.names_in(self.pack, self.facts)
            os.utime(self.pack)
        except FileNotFoundError:
            pass
        except pack.DamagedPackError as error:
            self.problem = f"{self.pack}: {error}"
        except OSError as error:
            self.problem = f"{error.filename or self.pack}: {error.strerror}"


@contextmanager
def open_cache(facts: Mapping[str, Any]) -> Iterator[CompileCache]:
    """Let torch.compile and Triton work in the folder of this node, filled with what earlier runs have compiled.

    Processes of a node share the folder. The first one removes what a run left that was killed before its first step,
    perhaps in the middle of a file.

    Args:
        facts: what the code depends on, as JSON values.

    Raises:
        OSError: a folder cannot be made or is not of this user alone.
    """
    key = key_of(facts)
    packs = private(cache_folder() / _FOLDER)
    folders = private(local_folder() / _FOLDER)
    cache = CompileCache(private(folders / key), packs / f"{key}{SUFFIX}", facts)
    with ExitStack() as stack:
        lock = open_lock(cache.folder / _LOCK)
        stack.callback(os.close, lock)
        os.utime(lock)
        if _is_first(lock):
            if not (cache.folder / _COMPLETE).exists():
                _empty(cache.folder)
            _remove_unused(folders, cache.folder)
        cache._fill()
        (cache.folder / _COMPLETE).unlink(missing_ok=True)
        fcntl.flock(lock, fcntl.LOCK_SH)
        stack.enter_context(_variables(cache.folder))
        stack.enter_context(without_compiler(cache.folder, is_warm=cache.source is not None, device=facts["device"]))
        yield cache


def in_words() -> str:
    """Return what earlier runs of the user have kept, or why it cannot be used."""
    try:
        folder = cache_folder() / _FOLDER
        if not folder.exists():
            return f"none kept yet in {folder}"
        sizes = [path.stat().st_size for path in private(folder).glob(f"*{SUFFIX}")]
    except OSError as error:
        return f"cannot be kept: {error}"
    return f"{counted(len(sizes), 'pack')} ({sum(sizes) / 2**20:.1f} MiB) in {folder}"


def _is_first(lock: int) -> bool:
    """Lock for all others if nobody uses the folder; otherwise wait until it is filled, and share it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(lock, fcntl.LOCK_SH)
        return False
    return True


@contextmanager
def _variables(folder: Path) -> Iterator[None]:
    """Name the folders to torch and Triton, also in child processes."""
    before = {name: os.environ.get(name) for name in VARIABLES}
    os.environ.update({name: str(folder / below) for name, below in VARIABLES.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _is_compiling(folder: Path) -> bool:
    """Return whether a process of any run compiles C++ in the folder: the linker writes its file in place."""
    for path in folder.glob("inductor/locks/*.lock"):
        with _locked(path) as is_free:
            if not is_free:
                return True
    return False


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock and yield True, or False if another process holds it."""
    with ExitStack() as stack:
        lock = open_lock(path)
        stack.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != _LOCK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _remove_unused(folders: Path, own: Path) -> None:
    """Remove the folders of other code that nobody uses, but for the newest."""
    found = sorted((path for path in folders.iterdir() if path != own), key=_used, reverse=True)
    for path in found[_MOST_FOLDERS - 1 :]:
        with suppress(OSError), _locked(path / _LOCK) as is_free:
            if is_free:
                shutil.rmtree(path, ignore_errors=True)


def _remove_old(own: Path) -> int:
    """Remove the least recently used packs beyond the limit and those that a killed process left; return their number.

    Other runs of the user may do the same.
    """
    removed, left = 0, _MOST_BYTES - own.stat().st_size
    for path in sorted(own.parent.iterdir(), key=_used, reverse=True):
        with suppress(FileNotFoundError):
            if is_temporary(path.name, path.name.partition(SUFFIX)[0] + SUFFIX):
                if time.time() - _used(path) > _KILLED_S:
                    path.unlink()
            elif path.suffix == SUFFIX and path != own:
                left -= path.stat().st_size
                if left < 0:
                    path.unlink()
                    removed += 1
    return removed


def _used(path: Path) -> float:
    """Return when a pack or a folder was used last; 0 if it is gone."""
    with suppress(OSError):
        return (path / _LOCK if path.is_dir() else path).stat().st_mtime
    return 0.0
