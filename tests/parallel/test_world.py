"""``World.on_all_ranks``: every rank has its value, or every rank has the same error."""

import errno
import os
import resource
import socket
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch

from fastdiff.errors import DataError, StorageError
from fastdiff.parallel import world as module
from fastdiff.parallel.world import World, start_world
from tests.support.forked import fork_server, forked_ranks, values
from tests.support.waiting import LIMIT_S


def _fails_on_rank_1(world: World, error: Exception) -> str:
    def action() -> int:
        if world.rank == 1:
            raise error
        return world.rank

    try:
        return str(world.on_all_ranks(action))
    except (DataError, StorageError) as found:
        return f"{type(found).__name__} everywhere={found.everywhere}: {found}"


def _square(world: World) -> int:
    return world.on_all_ranks(lambda: world.rank**2)


def test_each_rank_gets_its_own_value() -> None:
    assert values(forked_ranks(_square, ranks=3)) == [0, 1, 4]


def test_the_error_of_one_rank_is_raised_on_all() -> None:
    found = values(forked_ranks(_fails_on_rank_1, DataError("shard 3 is cut off")))
    assert found == ["DataError everywhere=True: shard 3 is cut off"] * 2


def _bug_on_first(world: World) -> str:
    def action() -> int:
        raise KeyError("a bug")

    try:
        return str(world.on_rank0(action))
    except (KeyError, RuntimeError) as found:
        return f"{type(found).__name__}: {found}"


def test_a_bug_of_rank_0_reaches_all() -> None:
    first, second = values(forked_ranks(_bug_on_first))
    assert first == "KeyError: 'a bug'"
    assert second.startswith("RuntimeError: rank 0 failed:\nTraceback")
    assert second.endswith("KeyError: 'a bug'")


def test_an_oserror_of_one_rank_becomes_a_storage_error_on_all() -> None:
    found = values(forked_ranks(_fails_on_rank_1, OSError(28, "No space left on device", "/runs/a")))
    message = "/runs/a: No space left on device; free some space, or choose a folder on another disk"
    assert found == [f"StorageError everywhere=True: {message}"] * 2


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_of_the_allocator_grow_unless_the_user_has_options(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for given in names:
        monkeypatch.delenv(given, raising=False)
    start_world()
    assert [os.environ.get(given) for given in names] == ["expandable_segments:True", None]
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv(name, "max_split_size_mb:128")
    start_world()
    assert {given: os.environ[given] for given in names if given in os.environ} == {name: "max_split_size_mb:128"}


def _start_beside_a_rival() -> list[int | None]:
    """Start a world without a launcher; return the error numbers of another server that asks for its port meanwhile."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    select, refused = module.select_device, []

    def select_late(*arguments: Any) -> Any:
        try:
            socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))).close()
        except OSError as error:
            refused.append(error.errno)
        return select(*arguments)

    with mock.patch.object(module, "select_device", select_late):
        start_world()
    return refused


def test_nobody_takes_the_port_of_a_run_without_a_launcher() -> None:
    with ProcessPoolExecutor(1, fork_server()) as process:
        assert process.submit(_start_beside_a_rival).result(LIMIT_S) == [errno.EADDRINUSE]


def _pages_cleared(world: World) -> int:
    """Pages that the system hands out in a step which allocates blocks together and frees them: the most of four kinds.

    The first steps may take new ones, because aligned blocks leave gaps that are too small for the next; and a small
    object at the end of the heap may keep blocks of one kind even if freed memory is returned.
    """

    def step(count: int, mib: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [torch.full((mib * 2**18,), 1.0) for _ in range(count)]
        assert len(blocks) == count
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    return max(min(step(*kind) for _ in range(12)) for kind in ((4, 30), (8, 30), (3, 31), (16, 10)))


def test_a_step_on_a_cpu_gets_the_memory_that_the_last_one_freed() -> None:
    assert max(values(forked_ranks(_pages_cleared, ranks=1))) < 1000
