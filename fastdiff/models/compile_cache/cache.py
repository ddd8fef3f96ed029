"""The compiled code of a run: a folder on this node, in which torch.compile and Triton work, and its pack.

The folder is on a disk of the node, because its many small files and locks are slow on a network, or have no effect
there. The pack is where all nodes see it. A process takes part with ``open_cache``.
"""

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fastdiff.files import is_temporary
from fastdiff.models.compile_cache import pack
from fastdiff.models.compile_cache.compiler import without_compiler
from fastdiff.models.compile_cache.environment import key_of
from fastdiff.models.compile_cache.node_folders import is_held, joined, was_killed
from fastdiff.plurals import counted
from fastdiff.private_folders import cache_folder, local_folder, local_name, private

VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Environment variables of torch and Triton for their folders, and ours."""
_FOLDER, _HEADERS = "compiled", "headers"
"""Name of the folder of folders, and of the one with precompiled headers, which any code may use."""
SUFFIX = ".zip"
"""Of the name of a pack."""
_MOST_BYTES = 2**31
"""What packs may take together; the least recently used ones are removed."""
_KILLED_S = 3600.0
"""Age of a temporary file that nobody writes any more."""


class NotWholeError(Exception):
    """The folder may hold half a file; the message says why."""


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
        return _kernels(pack.members(self.folder))

    def keep(self) -> Kept | None:
        """Write a pack if there is code that the last one lacks; return what was done.

        Raises:
            NotWholeError: some of the code may be half a file, now or as long as the folder is used.
            OSError: it cannot be written.
            ValueError: it is too large.
        """
        names = pack.members(self.folder)
        if names <= self._packed:
            return None
        # Asked now: what was half a file when the names were read is whole, or locked still, or of a killed process.
        if _is_compiling(self.folder):
            raise NotWholeError("another process was compiling")
        if was_killed(self.folder):
            raise NotWholeError("a process was killed that compiled, too, or the node has removed files")
        size = pack.write(self.pack, self.folder, names, self.facts)
        self._packed = names
        return Kept(_kernels(names), size, _remove_old(self.pack))

    def _fill(self) -> None:
        """Take from the pack what the folder lacks."""
        self.source = self.folder if self.kernels else None
        try:
            self._packed, written = pack.unpack(self.pack, self.folder, self.facts)
        except FileNotFoundError:
            return
        except pack.DamagedPackError as error:
            self.problem = f"{self.pack}: {error}"
            return
        except OSError as error:
            self.problem = f"{error.filename or self.pack}: {error.strerror}"
            return
        if written:
            self.source = self.pack
        with suppress(OSError):  # it counts as used at its age then
            os.utime(self.pack)


@contextmanager
def open_cache(facts: Mapping[str, Any], *, compiles: bool = True) -> Iterator[CompileCache]:
    """Let torch.compile and Triton work in the folder of this node, filled with what earlier runs have compiled.

    Processes of a node share the folder (``node_folders``).

    Args:
        facts: what the code depends on, as JSON values.
        compiles: torch.compile is used; otherwise it is not even imported.

    Raises:
        OSError: a folder cannot be made or is not of this user alone.
    """
    key = key_of(facts)
    packs = private(cache_folder() / _FOLDER)
    folders = private(local_folder() / _FOLDER)
    with ExitStack() as stack:
        cache = stack.enter_context(joined(folders, key, partial(_filled, packs / f"{key}{SUFFIX}", facts)))
        stack.enter_context(_variables(cache.folder))
        if compiles:
            # With a GPU, C++ is compiled for an optimizer alone, whose few kernels do not pay for precompiled headers.
            precompiles = cache.source is None and facts["device"] == "cpu"
            headers = stack.enter_context(joined(folders, _HEADERS, Path)) if precompiles else None
            stack.enter_context(without_compiler(cache.folder, headers))
        yield cache


def _filled(path: Path, facts: Mapping[str, Any], folder: Path) -> CompileCache:
    cache = CompileCache(folder, path, facts)
    cache._fill()
    return cache


def is_inherited(name: str, value: str) -> bool:
    """Return whether a process that started this one has set the variable in ``open_cache``."""
    folder = Path(value)
    return folder.name == VARIABLES[name] and folder.parts[-4:-2] == (local_name(), _FOLDER)


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


@contextmanager
def _variables(folder: Path) -> Iterator[None]:
    """Name the folders to torch and Triton, also in child processes."""
    before = {name: os.environ.get(name) for name in VARIABLES}
    os.environ.update({name: str(folder / below) for name, below in VARIABLES.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _kernels(names: set[str]) -> int:
    return sum(name.endswith((".main.so", ".cubin")) for name in names)


def _is_compiling(folder: Path) -> bool:
    """Return whether a process of any run compiles C++ in the folder: the linker writes its file in place."""
    return any(is_held(path, fcntl.flock) for path in folder.glob("inductor/locks/*.lock"))


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
    """Return when a pack was used last; 0 if it is gone."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0
