"""``--quiet`` and ``--verbose``: what a command, and the ranks that it starts, tell on standard error."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdiff.cli import main as command
from fastdiff.config.command_line import train_flags
from tests.support.nights import by_day
from tests.support.runs import flags, tiny
from tests.support.scripts import COMMAND, run_with_forks

_UNPARSED = {"train", "bench"}
"""Commands that hand their flags on; of others, here: the parser of a run, and that of the benchmarks."""


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                if name not in _UNPARSED:
                    yield from _parsers(child)


def test_every_command_has_both() -> None:
    from fastdiff_bench.__main__ import parser_of

    found = [*_parsers(command._parser()), train_flags.pre_parser(), *_parsers(parser_of(["report"]))]
    assert len(found) > 20
    for parser in found:
        assert {"--quiet", "--verbose"} <= parser._option_string_actions.keys(), parser.prog


@pytest.mark.parametrize("before", by_day([False], True))
def test_a_quiet_run_of_two_ranks_tells_warnings_alone(digits: Path, tmp_path: Path, before: bool) -> None:
    config = flags(tiny(digits, tmp_path / "run", steps=2))
    words = ["--quiet", "train", *config] if before else ["train", *config, "--quiet"]
    done = run_with_forks(COMMAND, *words, "--ranks", "2", RANK="1")
    assert done.code == 0, done.output
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()
    (warning,) = filter(None, done.output.splitlines())
    assert re.search(r"WARNING ignoring RANK\b.* of the environment", warning)


def test_a_quiet_encode_prints_its_results_alone(tmp_path: Path) -> None:
    done = run_with_forks(COMMAND, "--quiet", "encode", "digits", tmp_path / "data")
    assert done.code == 0, done.output
    assert "is complete" in done.output
    assert " INFO " not in done.output


def test_a_verbose_command_tells_the_start_of_the_ranks_and_the_traceback_of_an_error(
    digits: Path, tmp_path: Path
) -> None:
    done = run_with_forks(COMMAND, "train", *flags(tiny(digits, tmp_path / "run", steps=1)), "--verbose")
    assert done.code == 0, done.output
    assert re.search(r"DEBUG each rank: \S+ \S+train\.py", done.output)
    failed = run_with_forks(COMMAND, "verify", "--verbose", tmp_path / "nothing")
    assert failed.code != 0
    assert "Traceback" in failed.output
    assert "Traceback" not in run_with_forks(COMMAND, "verify", tmp_path / "nothing").output
