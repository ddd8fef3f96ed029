"""Compiled operators: one build per job folder, a cache that is whole or absent, and stale locks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fastdiff.cluster.supervisor import operators
from fastdiff.errors import ConfigError
from fastdiff.parallel import extension_locks
from fastdiff.parallel.extension_locks import stale_locks
from fastdiff.parallel.world import World
from fastdiff.training.engine import wait_for_builds
from tests.support.processes import run_ranks

HOLD = """
import runpy, sys, time
from importlib.util import find_spec
[torch] = find_spec("torch").submodule_search_locations  # all of which takes long to import
baton = runpy.run_path(f"{torch}/utils/file_baton.py")["FileBaton"](sys.argv[1])
assert baton.try_acquire()
print("held", flush=True)
time.sleep(float(sys.argv[2]))
baton.release()
"""
BROKEN_COMPILER = """#!/bin/sh
case "$*" in *-MMD*) echo 'no space left for the compiler' >&2; exit 1;; esac
exec c++ "$@"
"""
OPERATOR = "deepspeed_shm_comm"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of extensions in which one is built."""
    (tmp_path / "extensions" / OPERATOR).mkdir(parents=True)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    return tmp_path / "extensions"


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def held(lock: Path, seconds: float) -> subprocess.Popen[str]:
    """A process that holds torch's own lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, lock, str(seconds)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    process.stdout.close()
    return process


@pytest.fixture
def builder(root: Path) -> Iterator[subprocess.Popen[str]]:
    process = held(root / OPERATOR / "lock", 600)
    yield process
    process.kill()
    process.wait()


@pytest.mark.fault(16)
def test_a_killed_build_leaves_a_lock_that_is_found(root: Path, builder: subprocess.Popen[str]) -> None:
    [lock] = extension_locks.find(root)
    assert lock.holder == builder.pid
    assert extension_locks.find_stale(root) == []
    builder.kill()
    builder.wait()
    [stale] = extension_locks.find_stale(root)
    assert stale.path == root / OPERATOR / "lock"
    [problem] = stale_locks()
    assert str(stale.path) in problem
    said: list[str] = []
    extension_locks.wait(root, OPERATOR, said.append)
    assert said == [f"removed {stale.path}, the lock of a build that was killed"]
    assert extension_locks.find(root) == []


def test_a_lock_that_cannot_be_removed_is_explained(root: Path) -> None:
    (root / OPERATOR / "lock").touch()
    (root / extension_locks.OURS).symlink_to(root / "elsewhere")  # which is not followed
    with pytest.raises(ConfigError, match=r"(?s)lock of a build, 0 minutes old.*delete it: rm '"):
        extension_locks.wait(root, OPERATOR, lambda _: None)
    assert not (root / "elsewhere").exists()


def test_only_the_holder_of_our_lock_removes_another(root: Path) -> None:
    """Who does not hold it waits, here for a holder that removes the lock itself."""
    lock = root / OPERATOR / "lock"
    lock.touch()
    holder = subprocess.Popen(
        [
            "flock",
            "--exclusive",
            "--no-fork",
            root / extension_locks.OURS,
            "sh",
            "-c",
            f"echo held; read x; rm '{lock}'",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    said: list[str] = []
    extension_locks._remove(root, extension_locks.find(root)[0], said.append)
    assert lock.exists()
    holder.communicate(b"\n")
    extension_locks.wait(root, OPERATOR, said.append)
    assert said == []


def test_a_stopped_build_is_waited_for(root: Path, builder: subprocess.Popen[str]) -> None:
    psutil.Process(builder.pid).suspend()
    assert extension_locks.find_stale(root) == []


def test_a_build_that_goes_on_is_waited_for(root: Path) -> None:
    process = held(root / OPERATOR / "lock", 1.0)
    said: list[str] = []
    extension_locks.wait(root, OPERATOR, said.append)
    assert process.wait(30) == 0
    assert not (root / OPERATOR / "lock").exists()
    assert said == [f"waiting for process {process.pid}, which compiles {OPERATOR} ({root / OPERATOR / 'lock'})"]


def test_the_lock_of_another_extension_does_not_matter(root: Path) -> None:
    (root / "other").mkdir()
    (root / "other" / "lock").touch()
    extension_locks.wait(root, OPERATOR, lambda _: None)
    assert [lock.path.parent.name for lock in extension_locks.find_stale(root)] == ["other"]


@pytest.mark.fault(16)
def test_a_start_removes_a_stale_lock(root: Path) -> None:
    """DeepSpeed alone would wait for it for ever, on both ranks."""
    lock = root / OPERATOR / "lock"
    lock.touch()
    run_ranks(_wait_for_builds, ranks=2)
    assert not lock.exists()


def _wait_for_builds(world: World) -> None:
    world.together(wait_for_builds)


def test_a_build_under_a_supervisor_meets_no_lock(torch_extensions: Path, tmp_path: Path, caches: Path) -> None:
    """A lock that a killed job left in the cache is not copied, nor is the one of our own."""
    operators.publish(torch_extensions, operators.cache_folder())
    (operators.cache_folder() / OPERATOR / "lock").touch()
    (operators.cache_folder() / extension_locks.OURS).touch()
    operators.prepare(tmp_path / "job", pytest.fail)
    assert extension_locks.find(tmp_path / "job") == []
    assert not (tmp_path / "job" / extension_locks.OURS).exists()


def test_the_cache_keeps_times_and_no_locks(torch_extensions: Path, tmp_path: Path, caches: Path) -> None:
    built, job = tmp_path / "built", tmp_path / "job"
    operators._copy(torch_extensions, built)
    (built / OPERATOR / "lock").touch()
    operators.publish(built, operators.cache_folder())
    operators.prepare(job, pytest.fail)
    names = {path.name for path in (job / OPERATOR).iterdir()}
    assert names == {path.name for path in (built / OPERATOR).iterdir()} - {"lock"}
    for name in names:
        assert (job / OPERATOR / name).stat().st_mtime_ns == (torch_extensions / OPERATOR / name).stat().st_mtime_ns
    assert [path.name for path in operators.cache_folder().parent.iterdir()] == [operators.cache_folder().name]


def test_a_cache_that_cannot_be_read_or_written_is_only_a_cache(
    tmp_path: Path, caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says so, and the operators are compiled."""
    cached = operators.cache_folder()
    cached.mkdir(parents=True)
    (cached / "broken").symlink_to("nowhere")
    monkeypatch.setattr(operators, "_build", lambda folder: (folder / "built").touch())  # seen whole in other tests
    said: list[str] = []
    operators.prepare(tmp_path / "job", said.append)
    assert (tmp_path / "job" / "built").exists()
    assert "cannot be used" in said[0]
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    operators.prepare(tmp_path / "other", said.append)
    assert "cannot be cached in /proc/none" in said[-1]


def test_a_shared_folder_may_be_in_use_elsewhere(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy is printed at once; a machine that this one cannot see may hold the lock, so it is waited for."""
    monkeypatch.setattr(extension_locks, "is_shared", lambda _: True)
    lock = root / OPERATOR / "lock"
    lock.touch()
    said: list[str] = []

    def hear(line: str) -> None:
        said.append(line)
        lock.unlink()

    extension_locks.wait(root, OPERATOR, hear)
    assert len(said) == 1
    assert "waiting until it is 10 minutes old" in said[0]
    assert f"rm '{lock}'" in said[0]
    lock.touch()
    os.utime(lock, (time.time() - 3600, time.time() - 3600))
    extension_locks.wait(root, OPERATOR, said.append)
    assert said[1:] == [f"removed {lock}, the lock of a build that was killed"]
    assert not lock.exists()


def test_cached_operators_are_not_built_again(torch_extensions: Path, tmp_path: Path, caches: Path) -> None:
    """ninja finds nothing to do: the object files stay as they are."""
    operators.publish(torch_extensions, operators.cache_folder())
    job = tmp_path / "job"
    operators.prepare(job, pytest.fail)
    before = {path.name: path.stat().st_mtime_ns for path in (job / OPERATOR).glob("*.*o")}
    assert before
    operators._build(job)
    assert {path.name: path.stat().st_mtime_ns for path in (job / OPERATOR).glob("*.*o")} == before


def test_a_second_publisher_changes_nothing(torch_extensions: Path, tmp_path: Path, caches: Path) -> None:
    cached = operators.cache_folder()
    operators.publish(torch_extensions, cached)
    (tmp_path / "other" / "thing").mkdir(parents=True)
    operators.publish(tmp_path / "other", cached)
    assert {path.name for path in cached.iterdir()} == {OPERATOR}
    assert len(list(cached.parent.iterdir())) == 1


def test_a_build_that_fails_says_so_and_is_not_kept(
    tmp_path: Path, caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    compiler = tmp_path / "bin" / "c++"
    compiler.write_text(BROKEN_COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"(?s)cannot be compiled on .*doctor.*no space left for the compiler"):
        operators.prepare(tmp_path / "job", said.append)
    assert said == ["compiling DeepSpeed's operators; later jobs reuse them"]
    assert not caches.exists()
