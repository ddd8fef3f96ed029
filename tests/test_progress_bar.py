"""Progress: whole figures at every width of a terminal, plain lines elsewhere, messages above, nothing for a step."""

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastdiff import progress_bar
from fastdiff.console import write_line
from fastdiff.live_line import live_line
from fastdiff.progress_bar import Bar, is_plain_line
from fastdiff.standard_streams import lossy_output
from tests.support.processes import run
from tests.support.runs import flags, tiny
from tests.support.scripts import TRAIN
from tests.support.terminals import frames, on_terminal, run_on_terminal, seen

FACTS = r"123,456/400,000 steps  loss 0\.1534  [\d,]+ images/s  ETA \d+:\d\d:\d\d"


class Clock:
    """Takes the place of the module ``time``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(progress_bar, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    for name in ("COLUMNS", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return Clock(monkeypatch)


def _training(clock: Clock) -> Bar:
    bar = Bar("dit-xl-2-256", 400_000, "steps", done=123_400, rate=(256, "images"), keeps=True)
    bar.figures, bar.further = ["loss 0.1534"], ["lr 1.00e-04", "gradient norm 0.381"]
    clock.now += 3.0
    bar.update(56)
    return bar


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (120, rf"dit-xl-2-256   31% [━╸╺]{{10,}}  {FACTS}  lr 1\.00e-04"),
        (80, rf"dit-xl-2-256  {FACTS}"),
        (60, r"123,456/400,000 steps  loss 0\.1534  [\d,]+ images/s"),
        (40, r"123,456/400,000 steps  loss 0\.1534"),
    ],
)
def test_no_figure_is_cut_at_any_width(clock: Clock, columns: int, expected: str) -> None:
    with on_terminal(columns) as terminal:
        bar = _training(clock)
        drawn = frames(terminal.read())
        bar.close()
    assert max(map(len, drawn)) < columns
    assert re.fullmatch(expected, drawn[-1]), drawn


def test_the_line_gives_way_to_messages_and_to_the_bar_of_a_part(clock: Clock) -> None:
    with on_terminal(70) as terminal:
        bar = _training(clock)
        write_line("a message that is longer than the terminal is wide, by a word or two")
        with Bar("sampling", 20, "images") as part:
            clock.now += 1
            part.update(5)
            bar.update(0)
            assert seen(terminal.read())[-1].startswith("sampling   25% ")
        lines = seen(terminal.read())
        assert "loss 0.1534" in lines[-1]
        bar.close()
        clock.now += 1
        write_line("the end")
        lines += seen(terminal.read())
    assert lines[-3].endswith("in 0:04")
    assert lines[-2:] == ["the end", ""]


def test_a_terminal_is_drawn_four_times_a_second_whatever_the_steps(clock: Clock) -> None:
    with on_terminal() as terminal, Bar("run", 4000, "steps") as bar:
        for _ in range(4000):
            clock.now += 0.001
            bar.update()
        assert len(frames(terminal.read())) in range(15, 20)


@pytest.mark.parametrize("dumb", [False, True])
def test_where_no_line_can_be_drawn_over_a_plain_one_comes_now_and_then(
    clock: Clock, dumb: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if dumb:
        monkeypatch.setenv("TERM", "dumb")
        with on_terminal(200) as terminal:
            _fourteen_minutes(clock)
            said = terminal.read().replace("\r\n", "\n")
    else:
        _fourteen_minutes(clock)
        said = capsys.readouterr().err
    assert "\r" not in said
    assert "\x1b" not in said
    lines = said.splitlines()
    assert all(map(is_plain_line, lines))
    done = [int(re.findall(r"encode: (\d+)/840 images, ", line)[0]) for line in lines]
    gaps = [after - before for before, after in zip([0, *done], done, strict=False)]
    assert gaps == sorted(gaps[:-1]) + gaps[-1:]
    assert (gaps[0], gaps[-2], done[-1]) == (10, 30, 840)
    assert lines[0].endswith("encode: 10/840 images, 1%, 1.00 images/s, ETA 13:50")
    assert lines[-1].endswith("encode: 840/840 images, 100%, 1.00 images/s, in 14:00")


def _fourteen_minutes(clock: Clock) -> None:
    with Bar("encode", 840, "images") as bar:
        for _ in range(840):
            clock.now += 1
            bar.update()


def test_what_is_short_says_nothing_in_a_file(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Bar("verify", 8, "shards") as bar:
        for _ in bar.over(range(8)):
            clock.now += 1
    assert capsys.readouterr().err == ""


def test_a_terminal_that_hung_up_does_not_end_the_work(clock: Clock) -> None:
    with on_terminal() as terminal, lossy_output():
        bar = Bar("run", 10, "steps")
        os.close(terminal._ours)
        terminal._ours = os.dup(terminal.descriptor)
        for _ in bar.over(range(10)):
            clock.now += 1
        bar.close()
        write_line("the end")
    assert bar.done == 10


def test_without_colours_the_figures_stay_in_their_place(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with on_terminal(80) as terminal:
        bar = Bar("sampling", 100, "images")
        for _ in range(4):
            clock.now += 1
            bar.update(20)
        lines = [line for line in frames(terminal.read()) if line.startswith("sampling")]
        bar.close()
    assert len({line.index("/100 images") for line in lines[1:]}) == 1


def test_a_text_that_is_wider_than_the_terminal_is_cut(clock: Clock) -> None:
    with on_terminal(30) as terminal:
        with live_line.during("loading runs/a-very-long-name/of-a-run ..."):
            pass
        assert "loading runs/a-very-long-n..." in frames(terminal.read())


def test_what_has_no_bar_is_told_while_it_lasts(clock: Clock) -> None:
    with on_terminal() as terminal:
        with live_line.during("loading run ..."):
            write_line("a message")
            bar = Bar("sampling", 10, "steps")
            bar.close()
        with pytest.raises(ValueError, match="bad"), live_line.during("counting ..."):
            raise ValueError("bad")
        written = terminal.read()
    drawn = frames(written)
    assert drawn.index("loading run ...") < drawn.index(next(line for line in drawn if line.startswith("sampling")))
    assert "counting ..." in drawn
    assert "".join(seen(written)).strip() == "a message"


def test_a_training_at_80_columns(digits: Path, tmp_path: Path) -> None:
    """Each state of its line has whole figures, and all that it leaves fits."""
    config = tiny(digits, tmp_path / "run", steps=40)
    done = run_on_terminal([sys.executable, TRAIN, *flags(config)])
    assert done.code == 0, done.output
    drawn = frames(done.output)
    assert "starting: importing torch ..." in drawn
    assert any(re.search(r"starting, \d s so far: building the network", line) for line in drawn)
    bars = [line for line in drawn if "/40 steps" in line]
    for line in bars:
        assert re.fullmatch(
            r"run +\d+% [━╸╺]+  \d+/40 steps(  loss \d\.\d{4})?(  [\d,.]+ images/s  (ETA|in) \d+:\d\d)?.*", line
        ), line
    screen = [line for line in seen(done.output) if str(tmp_path) not in line]
    assert max(map(len, screen)) <= 80
    assert re.search(r"40/40 steps  loss \d\.\d{4}  [\d,.]+ images/s  in \d+:\d\d", "\n".join(screen))
    assert any(re.fullmatch(r"[\d:]+ INFO started in [\d.]+ s: importing torch [\d.]+ s,.*", line) for line in screen)


@pytest.mark.nightly
def test_a_training_into_a_pipe(digits: Path, tmp_path: Path) -> None:
    config = tiny(digits, tmp_path / "run", steps=40)
    done = run([sys.executable, TRAIN, *flags(config)])
    assert done.code == 0, done.output
    assert "\r" not in done.output
    assert "\x1b" not in done.output
    assert re.search(r"INFO started in [\d.]+ s: importing torch", done.output)
