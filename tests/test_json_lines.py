"""Files of JSON lines: foreign bytes, links and a full disk cost records at most, and never a run."""

import json
import os
import re
from pathlib import Path

import pytest

from fastdiff.json_lines import JsonLines, drop_records_after, last_record, read_records
from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from tests.support.injected.tiny_disk import tiny_disk
from tests.support.runs import launch, losses, records, tiny

BROKEN = (b"\xff\xfe\x00", b'{"step": 2, "loss"', b"[" * 10**5, b"[]", b'{"step": "x"}', b'{"step": null}', b"{}", b"")


def test_records_come_back(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "lines")
    assert read_records(tmp_path / "lines") == []
    lines.write({"step": 1, "loss": float("nan")})
    lines.write({"step": 2, "name": "größe\r"})
    lines.close()
    assert read_records(tmp_path / "lines") == [{"step": 1, "loss": None}, {"step": 2, "name": "größe\r"}]
    drop_records_after(tmp_path / "lines", 1)
    assert [record["step"] for record in read_records(tmp_path / "lines")] == [1]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_line_that_is_no_record_is_dropped(tmp_path: Path, broken: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"step": 1}\n' + broken + b'\n{"step": 2}\n')
    assert [record["step"] for record in read_records(path)] == [1, 2]
    drop_records_after(path, 9)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    assert "removed 1 lines that are no records" in capsys.readouterr().err


def test_a_run_whose_logs_end_in_other_bytes_goes_on(world: World, digits: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tiny(digits, run, steps=2), launch(0), world)
    for name in ("metrics.jsonl", "spikes.jsonl", "skipped.jsonl", "damaged.jsonl", "validation.jsonl"):
        with (run / name).open("ab") as file:
            file.write(b"\x00\xff\xfe half a line")
    train(tiny(digits, run, steps=4), launch(0, allow_change=("samples",)), world)
    assert [record["step"] for record in records(run)] == [1, 2, 3, 4]
    assert len(losses(run)) == 4


@pytest.mark.parametrize("tail", [b"", b'{"step": 3, "los', b'\xff\n{"step": 3}\n'], ids=["whole", "torn", "foreign"])
def test_a_resume_reads_the_end_of_a_long_log(world: World, digits: Path, tmp_path: Path, tail: bytes) -> None:
    """64 GiB that no disk has, which take minutes to read, before the records of two steps."""
    run = tmp_path / "run"
    train(tiny(digits, run, steps=2), launch(1), world)
    lines = (run / "metrics.jsonl").read_bytes()
    with (run / "metrics.jsonl").open("ab") as file:
        file.truncate(2**36)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + lines + tail)
    began = _bytes_read()
    assert drop_records_after(run / "metrics.jsonl", 1) is None
    assert (last_record(run / "metrics.jsonl") or {})["step"] == 1
    train(tiny(digits, run, steps=4), launch(1, allow_change=("samples",)), world)
    assert _bytes_read() - began < 2**30
    assert (last_record(run / "metrics.jsonl") or {})["step"] == 4


def _bytes_read() -> int:
    return int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0])


@pytest.mark.parametrize("size", [0, 1, 2**22 - 50, 2**22, 2**22 + 7, 2**23 + 100])
def test_a_log_is_cut_back_at_any_size(tmp_path: Path, size: int) -> None:
    """Records until step 500 stay, however many blocks are read; also behind a line that is none."""
    path = tmp_path / "lines"
    lines = [json.dumps({"step": step, "text": "x" * (size // 1000)}).encode() + b"\n" for step in range(1000)]
    path.write_bytes(b"".join(lines))
    drop_records_after(path, 500)
    assert path.read_bytes() == b"".join(lines[:501])
    path.write_bytes(b"".join([*lines[:400], b"broken\n", *lines[400:501]]) + lines[501].strip())
    drop_records_after(path, 501)
    assert path.read_bytes() == b"".join(lines[:502])
    drop_records_after(path, -1)
    assert path.read_bytes() == b""
    assert [entry.name for entry in tmp_path.iterdir()] == ["lines"]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("untouched")
    (tmp_path / "lines").symlink_to("other")
    with pytest.raises(OSError, match="lines"):
        JsonLines(tmp_path / "lines").write({"step": 1})
    assert (tmp_path / "other").read_text() == "untouched"


@pytest.mark.fault(7)
def test_records_wait_for_room(tmp_path: Path) -> None:
    """A disk that is full, then is not; every record is there once and whole."""
    with tiny_disk(tmp_path / "disk", 0.25) as disk:
        lines, hasty = JsonLines(disk / "buffered", buffered=True), JsonLines(disk / "hasty")
        with (disk / "ballast").open("wb") as ballast:
            while True:
                try:
                    os.write(ballast.fileno(), bytes(1000))
                except OSError:
                    break
        for step in range(100):
            lines.write({"step": step, "text": "x" * 100})
        assert (lines.count(), lines.last()) == (100, {"step": 99, "text": "x" * 100}), "also those that wait"
        with pytest.raises(OSError, match="hasty"):
            hasty.write({"step": 0, "text": "x" * 5000})  # more than a block
        (disk / "ballast").unlink()
        lines.write({"step": 100})
        lines.close()
        assert [record["step"] for record in read_records(disk / "buffered")] == list(range(101))
