"""The timeouts of a rank that watches itself; hangs themselves are in test_exit_message and test_supervisor."""

from __future__ import annotations

import faulthandler
from collections.abc import Sequence
from pathlib import Path

import pytest

from fastdiff.parallel.heartbeat import NODE_FOLDER, START_TIMEOUT_S, Heartbeat, Phase


def _limits_s(folder: Path, hang_timeout_s: float, phases: Sequence[Phase]) -> list[float]:
    """Return the timeouts that are set in these phases, in seconds."""
    found: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faulthandler, "dump_traceback_later", lambda timeout, **_: found.append(timeout))
        heart = Heartbeat(folder, 0, hang_timeout_s)
        for phase in phases:
            heart.beat(1, phase)
        heart.close()
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
