"""``--help`` of every command at 80 columns: a short usage, what the command does, no line too wide."""

import argparse
from collections.abc import Iterator

import pytest

from fastdiff.cli import main as commands
from fastdiff.config.command_line.short_help import SHOWN
from fastdiff_bench.__main__ import COMMANDS, parser_of


def commands_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The commands that a parser knows, and theirs."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield command
                yield from commands_of(command)


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_the_help_of_every_command_fits_a_terminal() -> None:
    every = [*commands_of(commands._parser()), *commands_of(parser_of(list(COMMANDS)))]
    shown = [command for command in every if command.add_help]
    assert len(shown) > 30
    for command in shown:
        usage, about, *rest = command.format_help().split("\n\n")
        assert usage.startswith(f"usage: {command.prog} ")
        assert usage.count("\n") <= 1, usage
        assert about[0].isupper() or about[0] == "`", about
        assert "``" not in about
        lines = [line for part in (usage, about, *rest) for line in part.splitlines()]
        assert [line for line in lines if len(line) > 80] == []


def test_what_a_command_needs_is_in_its_usage() -> None:
    found = {command.prog: command.format_usage() for command in commands_of(commands._parser())}
    assert found["fastdiff encode"] == "usage: fastdiff encode [FLAGS] SOURCE OUT\n"
    assert found["fastdiff export"] == "usage: fastdiff export --format FORMAT [FLAGS] RUN|FILE OUT\n"
    assert found["fastdiff launch local"] == "usage: fastdiff launch local --ranks K [FLAGS] [-- TRAIN FLAGS]\n"


def test_examples_can_be_copied() -> None:
    (launch,) = (command for command in commands_of(commands._parser()) if command.prog == "fastdiff launch")
    example = launch.format_help().replace("\\\n", " ").split("\n  fastdiff launch k8s ")[1]
    assert " ".join(example.split()) == (
        "--nodes 2 --ranks-per-node 8 --image registry/fastdiff --pvc data:/data -- --preset digits"
    )


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_short_help_of_train_fits_a_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        commands.main(["train", "--help"])
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if len(line) > columns] == []
    words = " ".join(text.split())
    for flags in SHOWN.values():
        for flag, about in flags.items():
            assert f"{flag} {about}" in words
    assert "[-]" not in text
