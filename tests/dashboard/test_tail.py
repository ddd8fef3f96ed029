"""New records of a file that grows, is torn, cut back, replaced, deleted."""

import json
import os
import shutil
from pathlib import Path

from fastdiff.dashboard.tail import Tail
from fastdiff.json_lines import Record, drop_records_after
from tests.dashboard.folders import lines


class Steps:
    """What a sink has been given since it was last cleared."""

    def __init__(self) -> None:
        self.found: list[float] = []
        self.cleared = 0

    def clear(self) -> None:
        self.found.clear()
        self.cleared += 1

    def add(self, record: Record) -> None:
        self.found.append(record["step"])


def steps(*numbers: int) -> str:
    return lines({"step": number, "pad": "x" * 40} for number in numbers)


def test_a_torn_line_is_left_for_the_next_time(tmp_path: Path) -> None:
    path, sink = tmp_path / "metrics.jsonl", Steps()
    tail = Tail(path, sink)
    tail.read()
    torn = json.dumps({"step": 3})
    path.write_text(steps(1, 2) + torn[:4])
    tail.read()
    assert sink.found == [1, 2]
    with path.open("a") as file:
        file.write(torn[4:])
    tail.read()
    assert sink.found == [1, 2], "without its end of line it may go on"
    with path.open("a") as file:
        file.write("\n" + steps(4))
    tail.read()
    tail.read()
    assert sink.found == [1, 2, 3, 4]


def test_lines_that_are_no_records_are_left_out(tmp_path: Path) -> None:
    path, sink = tmp_path / "metrics.jsonl", Steps()
    path.write_bytes(b'{"step": 1}\n\xff\xfe\n[]\n{"step": "x"}\n' + b"[" * 10_000 + b'\n{"step": 2}\n')
    Tail(path, sink).read()
    assert sink.found == [1, 2]


def test_a_line_longer_than_any_record_does_not_stop_it(tmp_path: Path) -> None:
    path, sink = tmp_path / "metrics.jsonl", Steps()
    path.write_bytes(b"x" * (9 * 2**20) + b"\n" + steps(7).encode())
    Tail(path, sink).read()
    assert sink.found == [7]


def test_a_resumed_run_that_cuts_its_log_back_is_read_anew(tmp_path: Path) -> None:
    path, sink = tmp_path / "metrics.jsonl", Steps()
    path.write_text(steps(*range(1, 7)))
    tail = Tail(path, sink)
    tail.read()
    drop_records_after(path, 4)
    with path.open("a") as file:
        file.write(steps(5, 6, 7))
    tail.read()
    assert sink.found == [1, 2, 3, 4, 5, 6, 7]


def test_a_file_that_is_cut_in_place_and_grows_beyond_is_read_anew(tmp_path: Path) -> None:
    """As on a full disk, where there is no room for a second file."""
    path, sink = tmp_path / "metrics.jsonl", Steps()
    path.write_text(steps(1, 2, 3))
    tail = Tail(path, sink)
    tail.read()
    with path.open("r+") as file:
        file.truncate(len(steps(1)))
    with path.open("a") as file:
        file.write(steps(20, 30, 40, 50))
    tail.read()
    assert sink.found == [1, 20, 30, 40, 50]


def test_a_deleted_file_has_no_records_and_another_one_begins_anew(tmp_path: Path) -> None:
    path, sink = tmp_path / "metrics.jsonl", Steps()
    path.write_text(steps(1, 2))
    tail = Tail(path, sink)
    tail.read()
    path.unlink()
    tail.read()
    assert sink.found == []
    path.write_text(steps(1))
    tail.read()
    assert sink.found == [1]


def test_a_pipe_or_a_folder_in_the_place_of_the_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    (tmp_path / "spikes.jsonl").mkdir()
    for name in ("metrics.jsonl", "spikes.jsonl"):
        sink = Steps()
        Tail(tmp_path / name, sink).read()
        assert sink.found == []


def test_what_was_read_stays_when_the_folder_is_gone_or_the_file_cannot_be_read(tmp_path: Path) -> None:
    path, sink = tmp_path / "run" / "metrics.jsonl", Steps()
    path.parent.mkdir()
    path.write_text(steps(1, 2))
    tail = Tail(path, sink)
    tail.read()
    path.rename(path.with_name("kept"))
    path.symlink_to(path)  # ELOOP
    tail.read()
    assert sink.found == [1, 2]
    path.unlink()
    path.with_name("kept").rename(path)
    shutil.rmtree(path.parent)
    tail.read()
    assert sink.found == [1, 2]


def test_a_long_file_is_read_in_slices(tmp_path: Path) -> None:
    path, sink = tmp_path / "metrics.jsonl", Steps()
    path.write_text(steps(*range(40_000)))
    tail = Tail(path, sink)
    assert not tail.read(until=0)
    assert 0 < tail.offset < tail.size == path.stat().st_size
    seen = len(sink.found)
    assert 0 < seen < 40_000
    while not tail.read(until=0):
        assert len(sink.found) > seen
        seen = len(sink.found)
    assert sink.found == [*range(40_000)]
