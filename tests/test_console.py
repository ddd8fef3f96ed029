"""Log lines of a run: with time, rank and level, without duplicates, and apart from the progress bar."""

import logging
import re
import subprocess
import sys

import pytest

from fastdiff.console import log
from tests.support.processes import ROOT


def test_a_line_has_time_and_level_and_the_rank_if_there_are_several(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log.info("alone")
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO alone\n", capsys.readouterr().err)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    log.error("one of four")
    assert re.fullmatch(r"\d\d:\d\d:\d\d \[rank 3\] ERROR one of four\n", capsys.readouterr().err)


def test_a_warning_is_given_once_and_other_lines_as_often_as_they_come(capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2, 1):
        log.warning("warning %d", number)
        log.info("line %d", number)
    said = capsys.readouterr().err
    assert [said.count(f"warning {number}") for number in (1, 2)] == [1, 1]
    assert said.count("line 1") == 2


def test_messages_of_libraries_have_the_same_form_and_come_once_per_node() -> None:
    code = """
import logging, warnings
from fastdiff.console import quieten
theirs = logging.getLogger("DeepSpeed")  # as DeepSpeed sets it up
theirs.propagate = False
theirs.addHandler(logging.StreamHandler())
quieten()
def _do_optimizer_sanity_check():  # the name of their function that doubts the optimizer
    theirs.warning("an untested optimizer")
for _ in range(2):
    warnings.warn("of a library", UserWarning)
    theirs.warning("of DeepSpeed")
    theirs.info("a setting")
    _do_optimizer_sanity_check()
    warnings.warn("x is deprecated", FutureWarning)
"""
    said = []
    for local_rank in "01":
        environment = {"LOCAL_RANK": local_rank, "RANK": local_rank, "WORLD_SIZE": "2", "PATH": ""}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
        )
        said.append(re.sub(r"\d\d:\d\d:\d\d", "TIME", done.stdout + done.stderr))
    assert said == [
        "TIME [rank 0] WARNING of a library (UserWarning of <string>:11)\nTIME [rank 0] WARNING of DeepSpeed\n",
        "",
    ]


def test_the_logger_is_apart_from_those_of_others() -> None:
    assert log.name == "fastdiff"
    assert not log.propagate
    assert logging.getLogger("fastdiff.part").parent is log
