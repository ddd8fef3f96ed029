"""Text and tables at the width of a terminal: whole words and numbers, and commands that can be copied."""

import shlex
import sys

import pytest

from fastdiff.console import Colour, show
from fastdiff.tables import table
from fastdiff.terminal import columns, fitted
from tests.support.terminals import on_terminal

ROWS = (
    ("GPUs", "recompute", "GiB of a rank", "images/s", "low-high", "why"),
    ("8xH200", "no", "17.6/136.8", "4,619", "3,125-5,371", "the fastest of all that fit"),
    ("2x8xA100", "yes", "11.4/76.3", "1,575", "1,062-1,835", "needs 2 nodes"),
)


def test_lines_break_between_words_and_nothing_is_lost() -> None:
    path = "/a/path/that/is/wider/than/the/line"
    text = f"planned: gradients, optimizer, averages and activations\n  of {path} of a run\nend"
    lines = fitted(text, 24).split("\n")
    assert lines == [
        "planned: gradients,",
        "    optimizer, averages",
        "    and activations",
        "  of",
        f"      {path}",
        "      of a run",
        "end",
    ]
    assert fitted(text, None) == text


def test_a_broken_command_is_still_that_command() -> None:
    argv = ["fastdiff", "train", "--preset", "dit-xl-2-256", "--data.path", "a folder of pictures", "--seed", "3"]
    lines = fitted(f"the fastest starts with:\n  {shlex.join(argv)}", 40).split("\n")[1:]
    assert len(lines) > 1
    assert max(map(len, lines)) <= 40
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == argv
    said = fitted("no data set here; make it with `fastdiff encode digits data`, then train", 50)
    assert "`fastdiff encode digits data`" in said


def test_each_line_of_a_comment_is_one() -> None:
    said = fitted("# - theirs depend on the number of processes and cannot be reproduced", 40)
    assert said == "# - theirs depend on the number of\n#     processes and cannot be reproduced"


def test_a_table_has_one_line_per_row_where_nobody_looks() -> None:
    lines = table(ROWS, (0, 5)).split("\n")
    assert len(lines) == len(ROWS)
    assert lines[1] == f"8xH200           no     17.6/136.8     4,619  3,125-5,371  {ROWS[1][5]}"


@pytest.mark.parametrize("room", [80, 60, 48])
def test_a_table_fits_its_terminal_without_a_cut_number(room: int) -> None:
    said = table(ROWS, (0, 5), room)
    assert max(map(len, said.split("\n"))) <= room
    words = said.split()
    assert {"8xH200", "4,619", "recompute", "fastest"} <= set(words)
    for first, second in (("3,125-", "5,371"), ("17.6/", "136.8")):
        assert first + second in words or {first, second} <= set(words)


def test_a_table_that_does_not_fit_is_told_row_by_row() -> None:
    said = table(ROWS, (0, 5), 30)
    assert max(map(len, said.split("\n"))) <= 30
    whole = " ".join(said.split())
    for row in ROWS[1:]:
        assert ", ".join(f"{name} {cell}" for name, cell in zip(ROWS[0], row, strict=True)) in whole


def test_a_result_is_wrapped_and_coloured_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "OK libraries: the loader is DALI, attention is sdpa"
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    wrapped = "OK libraries: the loader is DALI,\r\n    attention is sdpa"
    for name, value, expected in (
        ("NO_COLOR", "", f"\x1b[32m{wrapped}\x1b[0m"),
        ("TERM", "dumb", wrapped),
        ("TERM", "xterm", f"\x1b[32m{wrapped}\x1b[0m"),
        ("NO_COLOR", "1", wrapped),
    ):
        monkeypatch.setenv(name, value)
        with on_terminal() as terminal:
            assert columns(sys.stdout) == 40
            show(text, Colour.GREEN)
            assert terminal.read() == f"{expected}\r\n"
    monkeypatch.setenv("NO_COLOR", "")
    show(text, Colour.GREEN)
    assert capsys.readouterr().out == f"{text}\n"
