"""The timeouts of a rank that watches itself; hangs themselves are in test_exit_message and test_supervisor."""

import faulthandler
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from fastdiff.exit_message import NODE_FOLDER
from fastdiff.parallel.heartbeat import START_TIMEOUT_S, Heartbeat, Phase, note_failure, stacks_path
from tests.support.injected.tiny_disk import fill, tiny_disk


def _limits_s(folder: Path, hang_timeout_s: float, phases: Sequence[Phase]) -> list[float]:
    """Return the timeouts that are set in these phases, in seconds."""
    found: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faulthandler, "dump_traceback_later", lambda timeout, **_: found.append(timeout))
        heartbeat = Heartbeat(folder, 0, hang_timeout_s)
        for phase in phases:
            heartbeat.beat(1, phase)
        heartbeat.close()
    return found[1:]  # the first is that of the construction


@pytest.mark.parametrize("hang_timeout_s", [100.0, 900.0])
def test_a_supervisor_always_acts_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang_timeout_s: float) -> None:
    """Also at the start, whose timeout has a lower limit: a rank that ends itself then hides which one hangs."""
    phases: list[Phase] = ["start", "data", "forward", "callbacks", "end"]
    alone = _limits_s(tmp_path / "alone", hang_timeout_s, phases)
    assert [round(limit_s, -1) for limit_s in alone] == [max(START_TIMEOUT_S, hang_timeout_s), *3 * [hang_timeout_s]]
    node = tmp_path / "node"
    node.mkdir()
    monkeypatch.setenv(NODE_FOLDER, str(node))
    supervised = _limits_s(tmp_path / "supervised", hang_timeout_s, phases)
    assert all(there > 1.5 * here for here, there in zip(alone, supervised, strict=True))


def test_stacks_are_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("years of work")
    stacks = stacks_path(tmp_path / "run", 0)
    stacks.parent.mkdir(parents=True)
    stacks.symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match=stacks.name):
        Heartbeat(tmp_path / "run", 0, 0)
    assert (tmp_path / "mine").read_text() == "years of work"


def test_a_note_that_cannot_be_written_does_not_bar_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that is written stays."""
    with tiny_disk(tmp_path / "node", 1) as node:
        monkeypatch.setenv(NODE_FOLDER, str(node))
        fill(node)
        note_failure(75, "out of memory", micro=4)
        assert [path.name for path in node.iterdir()] == ["ballast"]
        (node / "ballast").unlink()
        note_failure(75, "out of memory", micro=2)
        note_failure(1, "no progress")
        (note,) = node.iterdir()
        assert json.loads(note.read_text()) == {"exit_code": 75, "message": "out of memory", "micro": 2}
