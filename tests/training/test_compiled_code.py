"""Compiled code of a run: when it is packed, and whose folders are used; a whole run in tests/end_to_end/."""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from filelock import FileLock
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from fastdiff.config.presets import preset
from fastdiff.config.run import RunConfig
from fastdiff.models.compile_cache.cache import VARIABLES, CompileCache, open_cache
from fastdiff.parallel.world import World
from fastdiff.training.compiled_code import KeepCode, _given, compiled_code
from fastdiff.training.state import TrainState
from tests.support.forked import forked_ranks, values
from tests.support.processes import run

STATE = cast(TrainState, None)
"""Not asked."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCache]:
    """A cache in folders of the test, with a kernel."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("FASTDIFF_CACHE", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with open_cache({"device": "cpu"}, compiles=False) as found:
        (found.folder / "inductor/locks").mkdir(parents=True)
        (found.folder / "inductor/k.main.so").write_bytes(b"code")
        yield found


def keeper(cache: CompileCache) -> KeepCode:
    return KeepCode(cache, is_keeper=True, tells=True)


def test_code_that_could_not_be_written_is_written_later(
    cache: CompileCache, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told once."""
    keep, packs = keeper(cache), cache.pack.parent
    packs.rename(packs.with_name("away"))
    keep.on_step(STATE)
    keep.on_step(STATE)
    packs.with_name("away").rename(packs)
    keep.on_step(STATE)
    assert not cache.pack.exists(), "the third step is no time to look"
    keep.on_step(STATE)
    assert cache.pack.exists()
    told = capsys.readouterr()
    assert (told.out + told.err).count("No such file or directory") == 1


@pytest.mark.parametrize("end", [KeepCode.on_end, KeepCode.on_preempted])
def test_code_that_another_process_was_compiling_is_kept_at_the_end(cache: CompileCache, end: Any) -> None:
    keep = keeper(cache)
    with FileLock(cache.folder / "inductor/locks/k.lock"):
        keep.on_step(STATE)
        assert not cache.pack.exists()
    end(keep, STATE)
    assert cache.pack.exists()


def test_code_that_is_never_whole_is_told_at_the_end(cache: CompileCache, capsys: pytest.CaptureFixture[str]) -> None:
    keep = keeper(cache)
    with FileLock(cache.folder / "inductor/locks/k.lock"):
        keep.on_step(STATE)
        keep.on_end(STATE)
    told = capsys.readouterr()
    assert (told.out + told.err).count("another process was compiling") == 1


def test_after_an_error_nothing_is_kept(cache: CompileCache) -> None:
    """It may come from a compilation, whose file is then half written."""
    keep = keeper(cache)
    with FileLock(cache.folder / "inductor/locks/k.lock"):
        keep.on_step(STATE)
    keep.close()
    assert not cache.pack.exists()


def test_folders_that_a_parent_process_names_are_not_the_users(
    cache: CompileCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has compiled in a run, or in torch's own folder, which Inductor then names in both variables."""
    assert {os.environ[name] for name in VARIABLES} == {str(cache.folder / name) for name in VARIABLES.values()}
    child = "from fastdiff.training.compiled_code import _given; print([_given()])"
    assert run(["python", "-c", child], TMPDIR=str(tmp_path)).output.splitlines()[-1] == "['']"
    with monkeypatch.context() as patched:  # ends before the cache
        patched.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
        patched.setenv("TRITON_CACHE_DIR", f"{default_cache_dir()}/triton/0")
        assert _given() == ""
        patched.setenv("TRITON_CACHE_DIR", str(tmp_path / "own"))
        assert _given() == f"TRITON_CACHE_DIR={tmp_path / 'own'}"


def compiling() -> RunConfig:
    config = preset("digits")
    return replace(config, performance=replace(config.performance, compile=True))


def move_to(home: Path, disk: Path) -> None:
    """Make them home directory and disk of this process, whose environment names no folders."""
    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ["FASTDIFF_CACHE"], tempfile.tempdir = str(home), str(disk)


def with_an_own_folder_on_rank_1(world: World, folder: Path) -> list[tuple[int, str]]:
    """Open and close the cache; return what all ranks exchange next, with the class of their callbacks."""
    move_to(folder, folder)
    if world.rank == 1:
        os.environ["TRITON_CACHE_DIR"] = str(folder / "own")
    with compiled_code(compiling(), world, world.device) as keep:
        return world.gather((world.rank, type(keep).__name__))


def test_nodes_with_other_variables_go_on_together(tmp_path: Path) -> None:
    assert values(forked_ranks(with_an_own_folder_on_rank_1, tmp_path)) == [[(0, "Callback"), (1, "Callback")]] * 2


def without_a_folder_on_rank_0(world: World, folder: Path) -> tuple[str, bool]:
    """Return the callback of a rank and whether it writes the pack."""
    move_to(folder, folder / str(world.rank))
    with compiled_code(compiling(), world, world.device) as keep:
        return type(keep).__name__, isinstance(keep, KeepCode) and keep._is_keeper


def test_another_rank_keeps_the_code_where_the_first_has_no_folder(tmp_path: Path) -> None:
    (tmp_path / "0").write_bytes(b"")  # a file in place of the temporary folder
    (tmp_path / "1").mkdir()
    assert values(forked_ranks(without_a_folder_on_rank_0, tmp_path)) == [("Callback", False), ("KeepCode", True)]


def test_a_run_that_compiles_nothing_does_not_import_the_compiler(tmp_path: Path) -> None:
    script = """
import sys
from fastdiff.models.compile_cache.cache import open_cache
with open_cache({"device": "a GPU"}, compiles=False):
    print("torch._inductor" in sys.modules)
"""
    done = run(["python", "-c", script], TMPDIR=str(tmp_path), FASTDIFF_CACHE=str(tmp_path / "home"))
    assert done.output.split()[-1] == "False", done.output
