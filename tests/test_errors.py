"""Storage errors: which errors are of that kind, and what they say."""

import errno
import os
from pathlib import Path

import pytest

from fastdiff.cli.main import main
from fastdiff.errors import StorageError, explained, is_lost_connection

OF_FILES = [
    errno.ENOSPC, errno.EACCES, errno.ENOENT, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EMFILE,
    errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.EBUSY, errno.EXDEV, errno.ENXIO, errno.EOVERFLOW, errno.ETXTBSY,
]  # fmt: skip


@pytest.mark.parametrize("number", OF_FILES, ids=errno.errorcode.get)
def test_an_error_with_a_file_name_is_of_storage(number: int) -> None:
    error = explained(OSError(number, os.strerror(number), "/a/file"))
    assert isinstance(error, StorageError)
    assert str(error).startswith(f"/a/file: {os.strerror(number)}; ")
    assert len(str(error).partition("; ")[2]) > 10, "what to do"


def test_both_names_of_a_rename_are_named() -> None:
    error = OSError(errno.EXDEV, os.strerror(errno.EXDEV), "a", None, b"b")
    assert str(explained(error)).startswith("a -> b: ")


def test_a_long_path_leaves_room_for_the_cause() -> None:
    error = explained(OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), "9" * 5000, None, "b" * 5000))
    assert "9 ... -> b" in str(error)
    assert len(str(error)) < 2000, "what a message shows of it"
    assert "b ...: File name too long; choose a shorter name" in str(error)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(errno.ECONNRESET, "reset", "/a"),
        BrokenPipeError(errno.EPIPE, "pipe"),
        ChildProcessError(errno.ECHILD, "child", "/a"),
        ProcessLookupError(errno.ESRCH, "gone"),
        OSError("a message of a library"),
        OSError(errno.EADDRINUSE, "in use"),
        ValueError("other"),
    ],
    ids=repr,
)
def test_errors_of_connections_and_processes_are_not_of_storage(error: Exception) -> None:
    assert explained(error) is error


def _too_long(tmp_path: Path) -> str:
    return str(tmp_path / ("a" * 300))


def _in_a_circle(tmp_path: Path) -> str:
    (tmp_path / "circle").symlink_to("circle")
    return str(tmp_path / "circle" / "x")


def _circle(tmp_path: Path) -> str:
    (tmp_path / "circle").symlink_to("circle")
    return str(tmp_path / "circle")


def _below_a_file(tmp_path: Path) -> str:
    (tmp_path / "file").touch()
    return str(tmp_path / "file" / "x")


COMMANDS = [
    ["verify", "{}"],
    ["sample", "{}"],
    ["sample", "nothing", "--npz", "{}", "--num", "1"],
    ["export", "{}", "out", "--format", "lora"],
    ["evaluate", "{}"],
    ["evaluate", "nothing", "--reference", "{}"],
    ["evaluate", "nothing", "--reference", "nothing", "--out", "{}"],
    ["compare", "{}", "nothing"],
    ["encode", "digits", "{}"],
    ["encode", "{}", "out", "--autoencoder", "identity"],
    ["encode", "{}.tar", "out", "--autoencoder", "identity"],
    ["launch", "slurm", "--nodes", "1", "--ranks-per-node", "1", "--output", "{}", "--", "--preset", "digits"],
    ["launch", "k8s", "--nodes", "1", "--ranks-per-node", "1", "--image", "a", "--output", "{}", "--"],
    ["launch", "hosts", "--hostfile", "{}", "--", "--preset", "digits"],
    ["compat", "dit", "--", "--data-path", "{}"],
]  # fmt: skip


@pytest.mark.fault(28)
@pytest.mark.parametrize("place", [_too_long, _circle, _in_a_circle, _below_a_file])
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_path_that_cannot_be_is_one_message(
    words: list[str],
    place: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = place(tmp_path)  # type: ignore[operator]
    assert main([word.replace("{}", path) for word in words]) in (2, 65, 74)
    said = capsys.readouterr().err
    assert said.count("fastdiff: error") == 1, said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "message",
    [
        "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1",
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
        "Failed to send, sent 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
    ],
)
def test_lost_connections_are_recognised(message: str) -> None:
    assert is_lost_connection(message)
    assert not is_lost_connection("mat1 and mat2 shapes cannot be multiplied")
