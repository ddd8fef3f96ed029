"""The process group of a run: rank, size, device, and the collectives in use."""

import ctypes
import os
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed

from fastdiff.console import log
from fastdiff.errors import FastdiffError, storage_error
from fastdiff.parallel import rendezvous
from fastdiff.parallel.devices import Asked, select_device
from fastdiff.parallel.launcher import VARIABLES, Place, master, place

T = TypeVar("T")

_PATIENCE_S = 60.0
"""Seconds of a start after which a rank says that it waits for others."""
_MMAP_THRESHOLD, _TRIM_THRESHOLD = (-3, 2**25), (-1, 2**31 - 1)
"""Options of glibc's ``mallopt``: the size of blocks that are mapped one by one, and of free memory that is returned.

Each has the largest value that is taken.
"""


@dataclass(frozen=True, slots=True)
class World:
    """This process among the ``size`` processes of the run."""

    rank: int
    size: int
    device: torch.device
    group: torch.distributed.ProcessGroup | None = None
    """Process group of the collectives; None: the default one. A background thread needs its own."""

    @property
    def is_first(self) -> bool:
        """True on the rank that writes shared files."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            torch.distributed.all_gather_object(values, value, group=self.group)
        return values

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add ``tensor`` over all ranks, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor, group=self.group)
        return tensor

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace ``tensor`` by its largest elements over all ranks, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX, group=self.group)
        return tensor

    def broadcast_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace ``tensor`` by that of rank 0, in place."""
        if self.size > 1:
            torch.distributed.broadcast(tensor, 0, group=self.group)
        return tensor

    def concatenate(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors ``[n, ...]`` of all ranks, equal in shape, as ``[size * n, ...]`` in rank order."""
        if self.size == 1:
            return tensor
        joined = tensor.new_empty(self.size * len(tensor), *tensor.shape[1:])
        torch.distributed.all_gather_into_tensor(joined, tensor, group=self.group)
        return joined

    def raise_on_all(self, error: FastdiffError | None) -> None:
        """Raise the first error of any rank on every rank; return if no rank has one."""
        found = next((e for e in self.gather(error) if e is not None), None)
        if found is not None:
            found.everywhere = True
            raise found

    def on_all_ranks(self, action: Callable[[], T]) -> T:
        """Run ``action`` on every rank and return its value, or raise on every rank the first error of any.

        Without it a rank that fails alone leaves the others waiting for it in their next collective.
        """
        value, error = attempt(action)
        self.raise_on_all(error)
        return cast(T, value)

    def on_rank0(self, action: Callable[[], T]) -> T:
        """Run ``action`` on rank 0; return its value or raise its error on every rank.

        Any other exception is a bug: the other ranks raise a RuntimeError with its traceback, and wait for nothing.
        """
        result: list[Any] = [None, None]
        bug: Exception | None = None
        if self.is_first:
            try:
                result[1], result[0] = attempt(action)
            except Exception as found:  # raised below, once the others know
                bug = found
                result[0] = RuntimeError("rank 0 failed:\n" + "".join(traceback.format_exception(found)).rstrip())
        if self.size > 1:
            torch.distributed.broadcast_object_list(result, src=0, group=self.group)
        if bug is not None:
            raise bug
        if isinstance(result[0], FastdiffError):
            result[0].everywhere = True
        if result[0] is not None:
            raise result[0]
        return result[1]  # type: ignore[no-any-return]


def attempt(action: Callable[[], T]) -> tuple[T | None, FastdiffError | None]:
    """Return ``(value, None)`` or ``(None, error)``; any OSError becomes a StorageError, so that all ranks raise it."""
    try:
        return action(), None
    except FastdiffError as error:
        return None, error
    except OSError as error:
        return None, storage_error(error)


def start_world(timeout_s: float = 1800.0, device: Asked = "auto") -> World:
    """Join the run that the launcher describes in the environment; without a launcher, start a run of one rank.

    Reads its variables (``launcher.place``), MASTER_ADDR and MASTER_PORT. Uses NCCL with CUDA devices and gloo
    without. A second call in one process returns the same world. A collective fails after ``timeout_s``.

    Raises:
        ConfigError: a variable is no number that can be; the port is taken, or the host is unknown (rank 0 only);
            another rank did not start; the device is not there or cannot be used (``devices.select_device``).
        OSError: rank 0 cannot note its port.
    """
    _let_segments_grow()
    listener = None
    if "RANK" not in os.environ:
        listener = rendezvous.listen("127.0.0.1", 0, alone=True)  # from now on, so that nobody else takes the port
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ["MASTER_PORT"] = str(listener.getsockname()[1])
    here, (host, port) = place(), master()
    own = select_device(device, here.local_rank, here.local_size)
    if own.type == "cpu":
        _keep_freed_memory()
    _share_cores(here.local_size)  # also with a GPU: an offloaded optimizer steps on the cores
    if not torch.distributed.is_initialized():
        _record_collectives()
        with _told_of_a_wait(here):
            store = rendezvous.meet(here.rank, host, port, timeout_s, listener)
            torch.distributed.init_process_group(
                "nccl" if own.type == "cuda" else "gloo",
                store=store,
                rank=here.rank,
                world_size=here.size,
                timeout=timedelta(seconds=timeout_s),
            )
    return World(rank=here.rank, size=here.size, device=own)


@contextmanager
def _told_of_a_wait(here: Place) -> Iterator[None]:
    """Say for whom a long wait is: variables of an earlier job promise ranks that never come."""
    told = threading.Timer(
        _PATIENCE_S,
        log.warning,
        [
            f"still waiting for the other {here.size - 1} ranks: this is rank {here.rank} by {here.told_by}; if no "
            f"launcher has started this process, end it and `unset {' '.join(VARIABLES)}`"
        ],
    )
    told.daemon = True
    told.start()
    try:
        yield
    finally:
        told.cancel()


def _let_segments_grow() -> None:
    """Let the allocator of a GPU join free memory of several sizes, unless the user has set its options.

    Buckets and ZeRO-3 ask for many sizes, and would leave gaps. torch reads the options with its first allocation.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _keep_freed_memory() -> None:
    """Let glibc keep the memory that a step frees for the next one, unless the user has set its options.

    It would return large blocks to the system, which then clears every page of theirs again: 8,000 pages per step of
    the small UNet of ``digits-t2i``, an eighth of its processor time. Blocks above the threshold are still returned.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    allocator = getattr(ctypes.CDLL(None), "mallopt", None)  # of glibc alone
    for option, value in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
        if allocator is not None:
            allocator(option, value)


def _record_collectives() -> None:
    """Let NCCL record its last collectives and write them to a file at a timeout (PyTorch's flight recorder)."""
    for name, value in (("TORCH_FR_BUFFER_SIZE", "2000"), ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")):
        os.environ.setdefault(name, value)
    dump = os.environ.get("TORCH_FR_DUMP_TEMP_FILE")
    if dump:
        Path(dump).parent.mkdir(parents=True, exist_ok=True)


def world_size() -> int:
    """Return the number of ranks that the launcher started; ConfigError if its variables cannot be."""
    return place().size


def stop_world() -> None:
    """Leave the process group. It waits for all other ranks, so call it only after a success."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def free_port() -> int:
    """Return a free TCP port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _share_cores(local_size: int) -> None:
    """Give each rank its share of the cores; ranks that each use all cores slow one another down."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))
