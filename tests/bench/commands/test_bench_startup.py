"""``bench startup``: real starts of fastdiff and of the script, in turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.__main__ import main
from bench.commands import startup
from bench.measure.first_step import Start
from bench.records import record


@pytest.mark.nightly
def test_everything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["startup", "t2i-lora", "--smoke", "--out", str(tmp_path)]) == 0, capsys.readouterr().err
    found = record.read(tmp_path / "startup.jsonl")
    assert not found.failures
    starts = {(row.provider, row.quantity): row for row in found.measurements if "/" not in row.quantity}
    assert {name for name, _ in starts} == {*startup.OURS, startup.SCRIPT, startup.SCRIPT_LAUNCHED}
    assert all(row.n == 2 for row in found.measurements)
    processes = {name: row.facts["processes"] for (name, _), row in starts.items()}
    assert processes[startup.SCRIPT] == processes["fastdiff, python"] == 1
    assert processes["fastdiff, launch local"] == 2, "the supervisor is the process of the command"


def test_ratios_are_of_one_round() -> None:
    def starts(*cpu: float) -> list[Start]:
        return [Start(1.0, seconds, 1) for seconds in cpu]

    given = {"fastdiff, python": starts(1.0, 9.0), startup.SCRIPT: starts(2.0, 18.0)}
    [ratio] = [row for row in startup._measurements("t2i", given, 1) if "/" in row.quantity]
    assert (ratio.provider, ratio.value, ratio.p20, ratio.p80) == ("fastdiff, python", 0.5, 0.5, 0.5)


def test_an_unknown_case_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["startup", "nonesuch", "--out", str(tmp_path)])
    assert ended.value.code == 2
    assert not list(tmp_path.iterdir())
