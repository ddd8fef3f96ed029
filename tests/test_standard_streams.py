"""Output is never worth a run: full disks, closed descriptors and encodings of standard output and standard error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastdiff.standard_streams import Lossy
from tests.support.processes import Finished, run
from tests.support.runs import flags, intact, losses, tiny
from tests.support.scripts import TRAIN


def _shell(command: str, **environment: str) -> Finished:
    return run(["bash", "-c", command], OMP_NUM_THREADS="1", **environment)


def _words(*words: str | Path) -> str:
    return " ".join(f"'{word}'" for word in words)


@pytest.mark.nightly
@pytest.mark.fault(16)
def test_a_run_without_output_ends_well(digits: Path, tmp_path: Path) -> None:
    config = tiny(digits, tmp_path / "run", steps=3)
    done = _shell(f"{_words(sys.executable, TRAIN, *flags(config))} >&- 2>&- <&-")
    assert done.code == 0
    assert len(losses(tmp_path / "run")) == 3
    assert intact(tmp_path / "run") == [3]


@pytest.mark.fault(16)
def test_a_supervisor_and_its_rank_need_no_output(digits: Path, tmp_path: Path) -> None:
    """What both write goes to a full disk."""
    config = tiny(digits, tmp_path / "run", steps=3)
    command = _words("fastdiff", "launch", "local", "--ranks", "1", "--", *flags(config))
    assert _shell(f"{command} > /dev/full 2> /dev/full").code == 0
    assert len(losses(tmp_path / "run")) == 3
    assert intact(tmp_path / "run") == [3]


@pytest.mark.nightly
def test_a_report_that_nobody_gets_does_not_change_the_exit_code(tmp_path: Path) -> None:
    assert _shell(f"fastdiff verify {tmp_path / 'absent'} 2> /dev/full").code == 65
    assert _shell(f"{_words(sys.executable, TRAIN, '--preset', 'none')} 2>&-").code == 2


PRINTS = "fastdiff compat iddpm -- --data_dir images"
"""A command that prints its result in half a second."""


def test_a_result_that_was_not_written_is_an_error() -> None:
    done = _shell(f"{PRINTS} > /dev/full")
    assert done.code == 74
    assert "fastdiff: error: standard output: No space left on device; the printed result is incomplete" in done.output


def test_a_reader_that_has_seen_enough_is_none() -> None:
    assert _shell(f"set -o pipefail; {PRINTS} | head -c 1").code == 0


def test_a_name_that_the_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    done = _shell(f"fastdiff verify {tmp_path / 'größe'}", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.code == 65
    assert r"gr\xf6\xdfe" in done.output


def test_a_closed_descriptor_is_not_given_to_a_file(tmp_path: Path) -> None:
    code = """
import sys, fastdiff
with open(sys.argv[1], "w") as file:
    assert file.fileno() > 2, file.fileno()
print("dropped")
"""
    assert _shell(f"{_words(sys.executable, '-c', code, tmp_path / 'file')} >&- 2>&- <&-").code == 0
    assert (tmp_path / "file").read_text() == ""


def test_a_stream_takes_a_part_and_goes_on_when_there_is_room() -> None:
    """A pipe that is full for a while, and set to non-blocking by its other user."""
    size = 2**20
    count = [sys.executable, "-c", f"import sys; sys.exit(len(sys.stdin.buffer.read()) != {size})"]
    with subprocess.Popen(count, stdin=subprocess.PIPE) as reader:
        assert reader.stdin is not None
        os.set_blocking(reader.stdin.fileno(), False)
        stream = Lossy(reader.stdin.fileno())
        assert stream.write(bytes(size)) == size
    assert reader.returncode == 0
    assert stream.error is None
