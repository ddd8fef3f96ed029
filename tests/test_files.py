"""Unfinished folders and small files beside those of a user."""

from __future__ import annotations

import itertools
import shutil
import signal
from pathlib import Path

import pytest

from fastdiff.errors import ConfigError
from fastdiff.files import publish, temporary, unfinished_folder
from tests.support.forked import fork_server
from tests.support.injected.crash_points import CrashPoints


def _write(out: Path, *, fails: bool = False) -> None:
    with unfinished_folder(out) as folder:
        (folder / "file").write_text("content")
        if fails:
            raise RuntimeError("of the test")


def _die_at(out: Path, journal: Path, operation: int) -> None:
    with CrashPoints(out.parent, journal, operation).watched():
        _write(out)


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        _write(tmp_path / "out", fails=True)
    assert list(tmp_path.iterdir()) == []
    _write(tmp_path / "out")
    assert [path.relative_to(tmp_path) for path in sorted(tmp_path.rglob("*"))] == [Path("out"), Path("out/file")]


def test_a_leftover_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    """Killed at every operation: the folder is absent or whole, and the next process can write it."""
    for number in itertools.count():
        killed = fork_server().Process(target=_die_at, args=(tmp_path / "out", tmp_path / "journal", number))
        killed.start()
        killed.join(60)
        if killed.exitcode == 0:
            break
        assert killed.exitcode == -signal.SIGKILL
        if not (tmp_path / "out").exists():
            _write(tmp_path / "out")
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]
        shutil.rmtree(tmp_path / "out")
    assert number >= 8, "operations of a folder with one file"
    assert not (tmp_path / "out.unfinished").exists()


@pytest.mark.parametrize("name", ["out.tmp", "out.unfinished"])
def test_a_folder_of_the_user_stays(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine").write_text("years of work")
    if name == "out.unfinished":
        with pytest.raises(ConfigError, match="exists and is not of fastdiff"):
            _write(tmp_path / "out")
    else:
        _write(tmp_path / "out")
    assert (tmp_path / name / "mine").read_text() == "years of work"


def test_two_writers_of_a_folder_are_kept_apart(tmp_path: Path) -> None:
    with (
        unfinished_folder(tmp_path / "out") as folder,
        pytest.raises(ConfigError, match="another process is writing"),
        unfinished_folder(tmp_path / "out"),
    ):
        pass
    assert (tmp_path / "out").is_dir()
    assert not folder.exists()


def test_a_folder_that_appears_meanwhile_stays(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="appeared meanwhile"), unfinished_folder(tmp_path / "out"):
        (tmp_path / "out").mkdir()
    assert (tmp_path / "out").is_dir()


def test_a_small_file_replaces_a_link_and_follows_none(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("untouched")
    (tmp_path / "run.json").symlink_to("other")
    publish(tmp_path / "run.json", b"new")
    assert (tmp_path / "run.json").read_bytes() == b"new"
    temporary(tmp_path / "x").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="File exists"):
        publish(tmp_path / "x", b"new")
    assert (tmp_path / "other").read_text() == "untouched"
