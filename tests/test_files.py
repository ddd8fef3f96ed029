"""Unfinished folders and small files beside those of a user."""

import errno
import fcntl
import itertools
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from fastdiff.config.run_record import claim
from fastdiff.errors import ConfigError, StorageError
from fastdiff.files import lock, open_lock_in, publish, temporary, unfinished_folder
from fastdiff.outputs import require_output, write_output
from tests.support.forked import fork_server
from tests.support.injected.crash_points import CrashPoints, operations


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
        killed.join(240)
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


@pytest.mark.parametrize(
    "place", ["/proc/x", "/proc/x/y", "/dev/null/x", "{}/file/x", "{}/circle/x", "{}/" + "x" * 255]
)
def test_an_output_where_nothing_can_be_made_is_an_error_of_the_system(place: str, tmp_path: Path) -> None:
    """A kernel's file system answers ENOENT for each new name, however often it is tried."""
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to("circle")
    out = Path(place.format(tmp_path))
    with pytest.raises(OSError, match="x") as caught:
        _write(out)
    assert str(tmp_path) in str(caught.value) or str(out.parent) in str(caught.value)
    for attempt in (require_output, partial(write_output, content=b"content")):
        if len(out.name) < 255:
            with pytest.raises(OSError, match=str(out.parent)):
                attempt(out)
    with pytest.raises(OSError, match=r"lock|parts"):
        open_lock_in(Path(f"{out}.parts"), "lock")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["circle", "file"]


def test_a_leftover_that_cannot_be_removed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "out.unfinished"
    place.mkdir()
    (place / ".fastdiff-unfinished").touch()
    monkeypatch.setattr(Path, "unlink", _refuse)
    with pytest.raises(StorageError, match=r"out.unfinished: it can neither be used nor removed"):
        _write(tmp_path / "out")


def _refuse(path: Path) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))


def test_a_link_to_nothing_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("nothing")
    with pytest.raises(ConfigError, match="out exists"), unfinished_folder(tmp_path / "out"):
        pytest.fail("the work has begun")


def test_a_new_folder_takes_the_place_of_an_empty_one_and_of_no_other(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with unfinished_folder(out) as folder:
        (folder / "file").touch()
    assert [path.name for path in out.iterdir()] == ["file"]
    (tmp_path / "later").mkdir()
    with pytest.raises(ConfigError, match="appeared meanwhile"), unfinished_folder(tmp_path / "later"):
        (tmp_path / "later" / "mine").touch()
    assert [path.name for path in (tmp_path / "later").iterdir()] == ["mine"]


def test_a_required_output_leaves_no_trace_and_tells_what_it_replaces(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("earlier")
    caplog.set_level("INFO", "fastdiff")
    require_output(tmp_path / "file")
    assert caplog.messages == [f"{tmp_path / 'file'} exists and will be replaced"]
    require_output(tmp_path / "new" / "file")
    assert len(caplog.messages) == 1
    with pytest.raises(IsADirectoryError):
        require_output(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "new"]
    assert (tmp_path / "file").read_text() == "earlier"


def test_a_small_file_replaces_a_link_and_follows_none(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("untouched")
    (tmp_path / "run.json").symlink_to("other")
    publish(tmp_path / "run.json", b"new")
    assert (tmp_path / "run.json").read_bytes() == b"new"
    temporary(tmp_path / "x").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="File exists"):
        publish(tmp_path / "x", b"new")
    assert (tmp_path / "other").read_text() == "untouched"


def test_the_lock_of_a_run_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("untouched")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to("../other")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        claim(tmp_path / "run")
    assert (tmp_path / "other").read_text() == "untouched"


def test_an_output_follows_a_link_and_keeps_the_file_until_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("old")
    (tmp_path / "link").symlink_to("there/file")
    (tmp_path / "there" / "file.tmp").write_text("of the user")
    write_output(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / "file").read_bytes() == b"new"
    assert (tmp_path / "there" / "file.tmp").read_text() == "of the user"
    write_output(tmp_path / "new" / "private", b"flags", 0o600)
    assert (tmp_path / "new" / "private").stat().st_mode & 0o777 == 0o600
    with pytest.raises(IsADirectoryError):
        write_output(tmp_path / "there", b"new")


def test_an_output_in_a_circle_of_links_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(OSError, match=str(tmp_path / "circle")) as caught:
        write_output(tmp_path / "circle", b"content")
    assert caught.value.errno == errno.ELOOP
    assert (tmp_path / "circle").is_symlink()


def test_an_output_keeps_the_permissions_of_the_earlier_file(tmp_path: Path) -> None:
    """Whatever the umask is; but private content stays private."""
    path = tmp_path / "file"
    for earlier, wanted, found in ((0o600, 0o666, 0o600), (0o666, 0o666, 0o666), (0o644, 0o600, 0o600)):
        path.touch()
        path.chmod(earlier)
        write_output(path, b"new", wanted)
        assert path.stat().st_mode & 0o777 == found
        assert path.read_bytes() == b"new"


def test_an_output_is_written_to_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_output(tmp_path / "pipe", b"content")
    assert os.read(reader, 100) == b"content"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The system call is replaced: no file system of this machine lacks locks."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (tmp_path / "file").open("w") as file, pytest.raises(StorageError) as caught:
        lock(file.fileno(), tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: its file system cannot lock files ({os.strerror(number)})")
    assert "local_lock=flock" in str(caught.value)


LIMITS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, tuple(map(int, sys.argv[1:])))
from fastdiff.cli.main import main
code = main(["compat", "dit", "--", "--wrong"])
print(code, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("limits", "soft", "said"),
    [
        ((40, 4096), 4096, "the following arguments are required"),
        ((40, 40), 40, "this process may open 40 files (ulimit -Hn), expected at least 256; raise the limit"),
    ],
)
def test_the_limit_of_open_files_is_raised_or_refused(limits: tuple[int, int], soft: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITS, *map(str, limits)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["2", str(soft)], done.stderr
    assert said in done.stderr


def test_a_small_file_is_on_the_disk_before_its_rename_and_its_name_after_it(tmp_path: Path) -> None:
    folder, journal = tmp_path / "folder", tmp_path / "journal"
    folder.mkdir()
    with CrashPoints(folder, journal).watched():
        publish(folder / "file", b"content")
    done = operations([journal])
    assert [record["op"] for record in done] == ["create", "fsync", "rename", "fsync"]
    assert [done[1]["path"], done[1]["size"]] == [done[0]["path"], len(b"content")], "whole when it is synced"
    assert done[2]["to"] == str(folder / "file")
    assert done[3]["path"] == str(folder)


@pytest.mark.parametrize("replace", [False, True])
def test_a_folder_is_on_the_disk_before_its_rename_and_its_name_after_it(tmp_path: Path, replace: bool) -> None:
    place, journal = tmp_path / "place", tmp_path / "journal"
    out = place / "out"
    if replace:
        out.mkdir(parents=True)
        (out / "earlier").write_text("of the last export")
    with CrashPoints(place, journal).watched(), unfinished_folder(out, replace=replace) as folder:
        (folder / "file").write_text("content")
    assert [path.name for path in place.iterdir()] == ["out"]
    assert [path.name for path in out.iterdir()] == ["file"]
    synced = [record["path"] for record in operations([journal]) if record["op"] == "fsync"]
    content = place / "out.unfinished" / "content"
    assert synced == [str(content / "file"), str(content), str(place)]
