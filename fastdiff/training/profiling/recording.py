"""Recording of a rank: torch's profiler and, on a GPU, the history of its allocator, written to files."""

import gzip
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile

VIEWER, MEMORY_VIEWER = "https://ui.perfetto.dev", "https://pytorch.org/memory_viz"
_ALLOCATIONS = 1_000_000
"""Events of the allocator that a snapshot keeps, the newest."""
_TRACE = ".json.gz"
"""Extension of a trace."""
_TAIL, _END = 16, b"}"
"""Bytes to read at the end of a trace, and the last character of a complete one."""


class Recording:
    """A running recording of this process.

    On a CPU there is no snapshot of the memory; the trace has an event for each allocation instead.

    Args:
        device: of the run.
        detailed: also record shapes and memory, which costs time.

    Raises:
        RuntimeError: the profiler cannot start.
    """

    def __init__(self, device: torch.device, *, detailed: bool = True) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it announces every start and end, of which the run log tells
        self._on_gpu, self._detailed = device.type == "cuda", detailed
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        self._profiler = profile(
            activities=activities, record_shapes=detailed, profile_memory=detailed and not self._on_gpu
        )
        self._runs = False
        if self._on_gpu and detailed:  # first: if it fails, no profiler runs
            # Without stacks of frees: they are suspected of a SystemError in recomputed blocks under torch 2.11.
            torch.cuda.memory._record_memory_history(context="alloc", max_entries=_ALLOCATIONS)
        try:
            self._profiler.start()
        except BaseException:
            self.discard()
            raise
        self._runs = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def stop(self) -> None:
        """End the recording; on a GPU wait for its last kernel."""
        if self._on_gpu:
            torch.cuda.synchronize()
        self._runs = False
        self._profiler.stop()

    def write(self, folder: Path, rank: int, first: int, alive: Callable[[], None]) -> list[Path]:
        """Write the files of a stopped recording and return their paths: the trace, then the snapshot if there is one.

        Args:
            folder: for the files.
            rank: of this process.
            first: number of the first step in the recording, for the names of the files.
            alive: called between the parts, which take long.

        Raises:
            OSError: a file could not be written; nothing is left of it.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(prefix=f".rank-{rank}-", dir=folder) as scratch:
                files = self._files(Path(scratch), f"rank-{rank}-from-{first}", alive)
                return [path.replace(folder / path.name) for path in files]
        finally:
            self.discard()

    def _files(self, scratch: Path, name: str, alive: Callable[[], None]) -> Iterator[Path]:
        """Write the files of ``write`` one after the other to another folder."""
        # Uncompressed it is large: not on the disk of the run, which a background save may need meanwhile.
        with TemporaryDirectory() as local:
            raw = Path(local) / "trace.json"
            self._profiler.export_chrome_trace(str(raw))
            _require_complete(raw)
            alive()
            path = scratch / f"{name}{_TRACE}"
            with raw.open("rb") as source, gzip.open(path, "wb", compresslevel=5) as file:
                shutil.copyfileobj(source, file, 2**20)
        alive()
        yield path
        if self._on_gpu and self._detailed:
            path = scratch / f"memory-{name}.pickle"
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
            alive()
            yield path

    def discard(self, *, wait: bool = True) -> None:
        """End the recording without files, if it runs, and release the history of the allocator.

        ``wait`` False: not for the kernels of a GPU, on which torch's profiler waits when it ends; there it then
        records until the process ends.
        """
        if self._runs and (wait or not self._on_gpu):
            with suppress(RuntimeError):
                self.stop()
        if self._on_gpu and self._detailed:
            torch.cuda.memory._record_memory_history(enabled=None)


def trace_path(folder: Path, rank: int, first: int) -> Path:
    """Return the file of a rank's trace that begins with step ``first``, counted from 1."""
    return folder / f"rank-{rank}-from-{first}{_TRACE}"


def _require_complete(raw: Path) -> None:
    """Raise OSError for a trace that torch could not write or finish, of which it says nothing."""
    tail = b""
    if raw.exists():
        with raw.open("rb") as file:
            file.seek(max(0, raw.stat().st_size - _TAIL))
            tail = file.read()
    if not tail.rstrip().endswith(_END):
        raise OSError(f"torch could not write the trace to {raw.parent}; is that disk full? TMPDIR names another")
