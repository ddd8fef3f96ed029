"""``World.together``: every rank has its value, or every rank has the same error."""

from __future__ import annotations

import os

import pytest

from fastdiff.errors import DataError, StorageError
from fastdiff.parallel.world import World, start_world
from tests.support.forked import forked_ranks, values


def _fails_on_rank_1(world: World, error: Exception) -> str:
    def action() -> int:
        if world.rank == 1:
            raise error
        return world.rank

    try:
        return str(world.together(action))
    except (DataError, StorageError) as found:
        return f"{type(found).__name__} everywhere={found.everywhere}: {found}"


def _square(world: World) -> int:
    return world.together(lambda: world.rank**2)


def test_each_rank_gets_its_own_value() -> None:
    assert values(forked_ranks(_square, ranks=3)) == [0, 1, 4]


def test_the_error_of_one_rank_is_raised_on_all() -> None:
    found = values(forked_ranks(_fails_on_rank_1, DataError("shard 3 is cut off")))
    assert found == ["DataError everywhere=True: shard 3 is cut off"] * 2


def _bug_on_first(world: World) -> str:
    def action() -> int:
        raise KeyError("a bug")

    try:
        return str(world.on_first(action))
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
