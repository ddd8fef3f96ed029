"""Random command lines of all commands: one message each, no traceback, no secret, and soon."""

import os
from pathlib import Path

import pytest

from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from tests.support.inputs.command_lines import SECRET, Answer, answers, random_lines
from tests.support.runs import launch, tiny

SEED = 17
_CODES = {0, 2, 65, 70, 74, 75}


@pytest.fixture(scope="module")
def there(world: World, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Files and folders of every kind: a run, a data set, an image, text, links, a pipe, nothing."""
    folder = tmp_path_factory.mktemp("there")
    train(tiny(digits, folder / "run", steps=2), launch(), world)
    (folder / "empty").mkdir()
    (folder / "text.json").write_text("{}")
    (folder / "list.yaml").write_text("model: [2026-01-01, !!binary aGk=, !!set {a: null}]")
    (folder / "bytes.npz").write_bytes(b"PK\x03\x04\xff")
    (folder / "network.pt").write_bytes(b"\x80\x02.")
    (folder / "circle").symlink_to(folder / "circle")
    (folder / "gone").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "pipe")
    return [digits, folder / "nothing", folder / "text.json" / "below", *sorted(folder.iterdir())]


def wrong(answer: Answer) -> str | None:
    """What is wrong with an answer, if anything is."""
    if "Traceback (most recent call last)" in answer.output and "--verbose" not in answer.line.words:
        return "a traceback"
    if SECRET in answer.output:
        return "a secret"
    if answer.code not in _CODES:
        return f"exit code {answer.code} after {answer.cpu_s:.1f} s"
    if answer.code and not answer.output.strip():
        return "no message"
    return None


def check(seed: int, count: int, there: list[Path], folder: Path) -> None:
    found = [(wrong(answer), answer) for answer in answers(random_lines(seed, count, there), folder)]
    bad = [f"{why}: {a.line.program} {a.line.words}\n{a.output[-3000:]}" for why, a in found if why is not None]
    assert not bad, f"{len(bad)} of {count}:\n" + "\n\n".join(bad)
    assert sum(answer.code == 2 for _, answer in found) > count // 4


@pytest.mark.fault(28)
def test_random_command_lines_are_answered(there: list[Path], tmp_path: Path) -> None:
    check(SEED, 30, there, tmp_path)


@pytest.mark.nightly
@pytest.mark.fault(28)
def test_a_thousand_random_command_lines_are_answered(there: list[Path], tmp_path: Path) -> None:
    check(SEED + 1, 1000, there, tmp_path)
