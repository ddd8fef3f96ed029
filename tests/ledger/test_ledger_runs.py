"""Ledgers of real runs: with a slow rank, and beside faults of the file."""

import re
from pathlib import Path

import pytest

from fastdiff.cli.main import main
from fastdiff.cluster.supervisor.last_record import note_end
from fastdiff.cluster.supervisor.outcome import Outcome
from fastdiff.config.run import RunConfig
from fastdiff.diffusion.objective import Objective
from fastdiff.errors import ConfigError
from fastdiff.ledger.reader import read_ledger
from fastdiff.ledger.report import costs, in_words, stragglers
from fastdiff.parallel.compute_time import ComputeTime
from fastdiff.parallel.world import World
from fastdiff.training import metrics
from fastdiff.training.build import start_ledger
from fastdiff.training.loop import train
from tests.support.forked import forked_ranks, values
from tests.support.runs import launch, losses, tiny

FAST_S, SLOW_S = 1000.0, 1300.0
"""Seconds of a forward pass on a clock that only these passes advance, far more than the steps take."""


def _train_slowly(world: World, config: RunConfig) -> None:
    """Train, in forward passes that take 30 % more on the last rank, which is on another node, by the clock of each."""
    add_noise, is_slow, now = Objective.add_noise, world.rank == world.size - 1, 0.0

    def slowed(*args: object, **options: object) -> object:
        nonlocal now
        now += SLOW_S if is_slow else FAST_S
        return add_noise(*args, **options)  # type: ignore[arg-type]

    Objective.add_noise = slowed  # type: ignore[assignment,method-assign]
    metrics.ComputeTime = lambda device: ComputeTime(device, lambda: now)  # type: ignore[assignment,misc]
    if is_slow:
        import socket

        socket.gethostname = lambda: "slow"  # type: ignore[assignment]
    train(config, launch(0), world)


def test_a_rank_that_is_slower_by_30_percent_is_named(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values(forked_ranks(_train_slowly, tiny(digits, tmp_path / "run", steps=4)))
    [found] = stragglers(read_ledger(tmp_path / "run"))
    assert (found.start, found.rank, found.node) == (1, 1, "slow")
    assert found.longer == pytest.approx(0.3)
    assert main(["ledger", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().out
    assert re.search(r"straggler: in start 1 the others waited .* for rank 1 on slow, whose forward", told)
    assert "no forecast: the run has no validation, or no step" in told


def test_equal_ranks_are_no_stragglers_alone(world: World, digits: Path, tmp_path: Path) -> None:
    train(tiny(digits, tmp_path / "run", steps=2), launch(0), world)
    assert stragglers(read_ledger(tmp_path / "run")) == []


def test_a_link_is_not_followed_and_the_run_goes_on(world: World, digits: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run" / "ledger.jsonl").symlink_to(tmp_path / "precious")
    train(tiny(digits, tmp_path / "run", steps=2), launch(0), world)
    assert len(losses(tmp_path / "run")) == 2
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.fault(28)
@pytest.mark.parametrize("line", ['{"step": NaN}', '{"step": 1e999}', "[]", ""])
def test_a_log_without_a_last_step_does_not_matter(world: World, tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with start_ledger(tmp_path, 16, world):
        pass
    assert [start.outcome for start in read_ledger(tmp_path).starts] == ["done"]


def test_an_error_leaves_its_text_without_secrets(world: World, tmp_path: Path) -> None:
    with pytest.raises(ConfigError), start_ledger(tmp_path, 16, world):
        raise ConfigError("cannot read\nhttps://me:hunter2@example.org/a?sig=hunter2, token=hunter2")
    assert "hunter2" not in (tmp_path / "ledger.jsonl").read_text()
    sums = read_ledger(tmp_path)
    assert sums.starts[0].message == "cannot read https://example.org/a, token=***"
    assert f"start 1 ended: {sums.starts[0].message}" in in_words(tmp_path, sums, costs(sums, None, None))


def test_an_end_that_cannot_be_noted_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here for the path of the run, which is not UTF-8."""
    (tmp_path / "run").write_bytes(b"\xff")
    note_end(tmp_path, Outcome(0, ""))
    assert "lacks its end: UnicodeDecodeError" in capsys.readouterr().err


def test_the_file_for_prometheus_has_the_last_line_of_the_log(world: World, digits: Path, tmp_path: Path) -> None:
    """In the text format: ``# HELP``, ``# TYPE``, and a number per line with its labels."""
    config = tiny(digits, tmp_path / "run", steps=3, output__prometheus=str(tmp_path / "metrics" / "fastdiff.prom"))
    train(config, launch(0), world)
    text = (tmp_path / "metrics" / "fastdiff.prom").read_text()
    assert [path.name for path in (tmp_path / "metrics").iterdir()] == ["fastdiff.prom"]
    label = re.escape(f'run="{tmp_path / "run"}"')
    sample = re.compile(rf'([a-z_]+)\{{{label}(?:,account="([a-z ]+)")?\}} (\S+)')
    found = {}
    for line in text.splitlines():
        if not re.fullmatch(r"# (HELP fastdiff_\w+ .+|TYPE fastdiff_\w+ (gauge|counter))", line):
            match = sample.fullmatch(line)
            assert match, line
            found[match[1], match[2]] = float(match[3])
    assert found["fastdiff_step", None] == 3
    assert ("fastdiff_written_timestamp_seconds", None) in found
    assert found["fastdiff_samples", None] == 48
    assert found["fastdiff_loss", None] == losses(tmp_path / "run")[-1]
    assert found["fastdiff_seconds_total", "step"] > 0


def test_a_file_for_prometheus_that_cannot_be_written_ends_nothing(world: World, digits: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    train(
        tiny(digits, tmp_path / "run", steps=2, output__prometheus=str(tmp_path / "file" / "x.prom")), launch(0), world
    )
    assert len(losses(tmp_path / "run")) == 2
