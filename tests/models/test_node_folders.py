"""Folders of compiled code on a node, used by real processes that are killed: no later one takes half a file for whole.

The compiler here writes in place and, as torch does, only what is not there yet.
"""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from fastdiff.errors import Preempted
from fastdiff.models.compile_cache import node_folders, pack
from fastdiff.models.compile_cache.cache import CompileCache, NotWholeError, open_cache
from fastdiff.private_folders import local_name
from tests.support.forked import fork_server
from tests.support.injected.crash_points import CrashPoints, Operation
from tests.support.processes import run

FACTS = {"device": "cpu", "torch": "2"}
NAME, WHOLE = "inductor/ab/k.main.so", b"whole" * 100


def move_to(place: Path) -> None:
    """Make ``place`` home directory and disk of this process."""
    os.environ["FASTDIFF_CACHE"] = str(place / "home")
    (place / "disk").mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(place / "disk")


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``move_to``, undone at the end."""
    monkeypatch.setenv("FASTDIFF_CACHE", "")
    monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())
    return move_to


def opened() -> Any:
    return open_cache(FACTS, compiles=False)


def link(cache: CompileCache, name: str = NAME) -> None:
    path = cache.folder / name
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
    os.write(descriptor, WHOLE)
    os.close(descriptor)


def is_link(record: Operation) -> bool:
    return bool(record["op"] == "write" and record["path"].endswith(".main.so"))


def compile_and_die(place: Path, die_at: Any, name: str = NAME) -> None:
    """Do all that a run does, and note how many operations that were."""
    move_to(place)
    points = CrashPoints(place, place.with_suffix(".jsonl"), die_at)
    with points.watched(), opened() as cache:
        link(cache, name)
        cache.keep()
    place.with_suffix(".done").write_text(str(points.done))


def end(place: Path, die_at: Any, name: str = NAME) -> int | None:
    """Run ``compile_and_die`` in a process; return its exit code."""
    process = fork_server().Process(target=compile_and_die, args=(place, die_at, name))
    process.start()
    process.join()
    return process.exitcode


def folders_of(place: Path) -> list[Path]:
    return [path for path in (place / "disk" / local_name() / "compiled").iterdir() if path.name != ".lock"]


def test_a_kill_at_any_operation_leaves_nothing_torn(tmp_path: Path, moved: Any) -> None:
    """Before it, a run was killed in the middle of a file: the removal of its folder is killed, too."""
    before = tmp_path / "before"
    assert end(before, is_link) == -signal.SIGKILL
    [left] = folders_of(before)
    assert (left / NAME).stat().st_size == len(WHOLE) // 2
    shutil.copytree(before, tmp_path / "all")
    assert end(tmp_path / "all", None) == 0
    for operation in range(int((tmp_path / "all.done").read_text())):
        place = tmp_path / str(operation)
        shutil.copytree(before, place)
        assert end(place, operation) == -signal.SIGKILL
        moved(place)
        with opened() as cache:
            link(cache)
            cache.keep()
            assert folders_of(place) == [cache.folder], f"after operation {operation}"
        assert (cache.folder / NAME).read_bytes() == WHOLE, f"after operation {operation}"
        pack.unpack(cache.pack, place / "unpacked", FACTS)
        assert (place / "unpacked" / NAME).read_bytes() == WHOLE, f"after operation {operation}"


def hold(place: Path, pipe: Connection) -> None:
    """Use a folder until told, and say whether its code could be kept; in other words, be a long run."""
    move_to(place)
    with opened() as cache:
        pipe.send(cache.folder)
        pipe.recv()
        link(cache)
        try:
            pipe.send(cache.keep() is not None)
        except NotWholeError as error:
            pipe.send(str(error))


@contextmanager
def holding(place: Path) -> Iterator[tuple[Path, Connection]]:
    """A process in a folder of the node; when the context ends, it is asked to leave."""
    ours, theirs = fork_server().Pipe()
    process = fork_server().Process(target=hold, args=(place, theirs))
    process.start()
    try:
        yield ours.recv(), ours
    finally:
        ours.send(None)
        process.join()
        assert process.exitcode == 0


def test_nobody_comes_to_a_folder_in_which_a_process_was_killed(tmp_path: Path, moved: Any) -> None:
    """One that is there packs nothing of it; it is removed once that one has left."""
    place = tmp_path / "node"
    with holding(place) as (shared, neighbour):
        assert end(place, is_link) == -signal.SIGKILL
        assert folders_of(place) == [shared], "they shared it"
        moved(place)
        with opened() as cache:
            assert cache.folder != shared
            assert shared.exists()
            link(cache)
            assert (cache.folder / NAME).read_bytes() == WHOLE
    assert "was killed" in neighbour.recv()
    with opened() as cache:
        assert folders_of(place) == [cache.folder]
        assert cache.source == cache.folder, "the folder that was made meanwhile"


def test_processes_share_a_folder_and_the_last_one_leaves_it_whole(tmp_path: Path, moved: Any) -> None:
    place = tmp_path / "node"
    moved(place)
    with opened() as cache, holding(place) as (shared, neighbour):
        assert cache.folder == shared
        link(cache)
    assert neighbour.recv() is True
    with opened() as again:
        assert again.folder == shared


def test_an_error_counts_as_a_kill_and_its_code_comes_from_the_pack(tmp_path: Path, moved: Any) -> None:
    """A compiler may still write."""
    moved(tmp_path)
    with suppress(KeyboardInterrupt), opened() as cache:
        link(cache)
        cache.keep()
        link(cache, "inductor/ab/later.main.so")
        raise KeyboardInterrupt
    with opened() as again:
        assert again.folder != cache.folder
        assert not cache.folder.exists()
        assert again.source == again.pack
        assert pack.members(again.folder) == {NAME}


def test_a_preempted_run_leaves_its_folder_whole(tmp_path: Path, moved: Any) -> None:
    """Its ranks leave one after the other, and one of them still keeps the code."""
    moved(tmp_path)
    with suppress(Preempted), opened() as cache:
        with suppress(Preempted), opened():
            raise Preempted("asked to stop")
        link(cache)
        assert cache.keep() is not None
        raise Preempted("asked to stop")
    with opened() as again:
        assert again.source == cache.folder


def test_a_compiler_that_outlives_its_run_leaves_no_folder_to_trust(tmp_path: Path, moved: Any) -> None:
    moved(tmp_path)
    assert end(tmp_path, is_link) == -signal.SIGKILL
    [killed] = folders_of(tmp_path)
    with opened() as cache:
        (killed / NAME).parent.mkdir(parents=True)
        (killed / NAME).write_bytes(b"half")
        assert cache.folder != killed
    with opened() as again:
        assert again.folder == cache.folder
        assert not killed.exists()


def test_after_a_restart_of_the_node_its_files_are_not_trusted(
    tmp_path: Path, moved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved(tmp_path)
    with opened() as cache:
        link(cache)
    (tmp_path / "boot_id").write_text("00000000-another")
    monkeypatch.setattr(node_folders, "_BOOT", tmp_path / "boot_id")
    with opened() as again:
        assert (again.source, again.kernels) == (None, 0)


COMPILE = """
import sys
import torch
from fastdiff.models.compile_cache.cache import open_cache

with open_cache({"device": "without precompiled headers"}) as cache:
    print(cache.folder, cache.kernels, flush=True)
    for factor in map(float, sys.argv[1:]):
        found = torch.compile(lambda x: (x.sin() * factor).cos())(torch.ones(64))
        assert torch.allclose(found, (torch.ones(64).sin() * factor).cos())
        cache.keep()
    print(cache.kernels)
"""
TEAR_THE_SECOND = """#!/bin/sh
{real} "$@" || exit
for word in "$@"; do
  case "$last $word" in "-o "*.main.so)
    echo >> {links}
    if [ $(wc -l < {links}) = 2 ]; then truncate -s 2000 "$word"; kill -KILL $PPID; fi;;
  esac
  last=$word
done
"""


def test_code_of_torch_is_compiled_again_after_a_kill_past_the_first_step(tmp_path: Path) -> None:
    """The linker has written half of a second graph's file; the first one comes from the pack."""
    (tmp_path / "script.py").write_text(COMPILE)
    compiler, words = tmp_path / "g++", {"real": shutil.which("g++"), "links": tmp_path / "links"}
    places = {"FASTDIFF_CACHE": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    variables: dict[str, Any] = {**places, "CXX": str(compiler), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command: list[str | Path] = [sys.executable, tmp_path / "script.py", "2", "3"]

    compiler.write_text(TEAR_THE_SECOND.format(**words))
    compiler.chmod(0o755)
    killed = run(command, **variables)
    folder, kernels = killed.output.split()
    assert (killed.code, kernels) == (-signal.SIGKILL, "0")
    assert 2000 in [path.stat().st_size for path in Path(folder).rglob("*.main.so")]

    done = run(command, **variables)
    assert done.code == 0, done.output
    other, taken, kernels = done.output.split()
    assert (other != folder, taken, kernels) == (True, "1", "2")


COMPILE_AFTERWARDS = """
import shutil
import torch
from fastdiff.models.compile_cache.cache import open_cache

with open_cache({"device": "cpu"}) as cache:
    torch.compile(lambda x: x.sin() * 2)(torch.ones(64))
headers = list(cache.folder.parent.glob("headers-*"))
assert any(header.rglob("*.h") for header in headers), headers
for header in headers:
    shutil.rmtree(header)
torch.compile(lambda x: x.cos() * 3)(torch.ones(64))
"""


def test_a_process_compiles_after_a_run_whose_headers_are_gone(tmp_path: Path) -> None:
    """A notebook does, for one, after another process of the folder was killed."""
    (tmp_path / "script.py").write_text(COMPILE_AFTERWARDS)
    places = {"FASTDIFF_CACHE": str(tmp_path / "home"), "TMPDIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = run([sys.executable, tmp_path / "script.py"], **places)
    assert done.code == 0, done.output
