"""Files that wait for room: each full disk is reported once by name, and again when it becomes full again."""

from pathlib import Path

import pytest

from fastdiff.buffered_writes import AppendedFile, WholeFiles
from tests.support.injected.crash_points import CrashPoints, operations
from tests.support.injected.tiny_disk import fill, tiny_disk

RECORD = b"x" * 5000
"""More than a block."""


@pytest.mark.fault(7)
@pytest.mark.parametrize("stand_in", [None, True])
def test_each_disk_that_becomes_full_is_reported_once(
    tmp_path: Path, stand_in: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    def reported() -> list[str]:
        return [line.split(" WARNING ")[1].split(":")[0] for line in capsys.readouterr().err.splitlines()]

    with (
        tiny_disk(tmp_path / "a", 0.25, stand_in=stand_in) as a,
        tiny_disk(tmp_path / "b", 0.25, stand_in=stand_in) as b,
    ):
        files = [AppendedFile(disk / "run" / name, buffered=True) for disk in (a, b) for name in ("one", "two")]
        whole = WholeFiles(buffered=True)
        for disk in (a, b):
            (disk / "run").mkdir()
            fill(disk)
        for _ in range(2):
            for file in files:
                file.append(RECORD)
            whole.write(a / "run" / "three", RECORD)
        assert reported() == [str(a), str(b)]
        (a / "ballast").unlink()
        for file in (*files, whole):
            file.retry()
        assert reported() == [], "b is still full"
        assert (a / "run" / "two").read_bytes() == 2 * RECORD
        assert (a / "run" / "three").read_bytes() == RECORD
        fill(a)
        whole.write(a / "run" / "four", RECORD)
        files[0].append(RECORD)
        assert reported() == [str(a)], "it has become full again"
        for disk in (a, b):
            (disk / "ballast").unlink()
        for file in (*files, whole):
            file.close()
        assert reported() == []
        assert [len((disk / "run" / "one").read_bytes()) for disk in (a, b)] == [15000, 10000]


def test_a_file_that_waits_for_another_reason_is_reported_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        path.mkdir()
        AppendedFile(path, buffered=True).append(RECORD)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    for path, line in zip(paths, said, strict=True):
        assert f"WARNING {path}: Is a directory; it waits in memory" in line


@pytest.mark.parametrize("durable", [True, False])
def test_a_whole_file_waits_for_the_disk_unless_it_may_be_lost(tmp_path: Path, durable: bool) -> None:
    folder, journal = tmp_path / "folder", tmp_path / "journal"
    with CrashPoints(folder, journal).watched():
        WholeFiles().write(folder / "file", RECORD, durable=durable)
    assert any(record["op"] == "fsync" for record in operations([journal])) == durable
    assert (folder / "file").read_bytes() == RECORD


def test_a_disk_whose_files_are_lost_is_reported_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tiny_disk(tmp_path / "a", 0.25, stand_in=True) as disk:
        fill(disk)
        for _ in range(2):
            whole = WholeFiles(buffered=True)
            whole.write(disk / "file", RECORD)
            whole.close()
    said = [line for line in capsys.readouterr().err.splitlines() if f"WARNING {disk}: No space" in line]
    assert len(said) == 2
