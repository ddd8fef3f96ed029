"""Sums of a ledger from records with known answers, whole and damaged."""

import itertools
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastdiff.errors import ConfigError
from fastdiff.ledger import writer
from fastdiff.ledger.reader import Sums, read_ledger
from fastdiff.ledger.records import JOB_START, STARTED, SUBMITTED, open_ledger
from fastdiff.ledger.report import Straggler, costs, nodes, stragglers
from fastdiff.ledger.writer import Ledger

Event = dict[str, Any]


def start(began: float, **more: Any) -> Event:
    return {"event": "start", "at": began + 1, "step": 0, "began": began, "nodes": ["a", "a"], "samples": 16, **more}


def resume(at: float, step: int) -> Event:
    return {"event": "resume", "at": at, "step": step}


def time(began: float, at: float, step: int, **more: Any) -> Event:
    """A record of the time, all but what ``more`` has in the account of the step."""
    spent = {
        name: more.pop(name) for name in ("start", "save", "data wait", "drawing", "rewind", "stop") if name in more
    }
    seconds = {**spent, "step": at - began - sum(spent.values())}
    return {"event": "time", "from": began, "at": at, "step": step, "seconds": seconds, **more}


def left(at: float, step: int, outcome: str = "done") -> Event:
    return {"event": "end", "at": at, "step": step, "outcome": outcome}


def gone(at: float, step: int, beat: float, phase: str, code: int = 137) -> Event:
    return {"event": "end", "at": at, "step": step, "code": code, "beat": beat, "phase": phase}


KILLED = [
    start(100),
    resume(104, 0),
    time(100, 120, 30, start=5.0),
    gone(130, 40, 128, "forward"),  # ten more steps in the 8 s to the last beat
    start(150),
    resume(155, 25),
    time(150, 180, 75, start=6.0, save=4.0),
    left(181, 75),
]
"""Steps 1 to 40 in 15 s and 8 s, of which 26 to 40 are taken again; ended at 181 by the trainer."""


def read(folder: Path, events: list[Event]) -> Sums:
    (folder / "ledger.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    sums = read_ledger(folder)
    assert sum(sums.seconds.values()) == pytest.approx(sums.wall_s)
    assert all(seconds >= 0 for seconds in sums.seconds.values())
    return sums


def spent(sums: Sums) -> dict[str, float]:
    return {name: pytest.approx(seconds) for name, seconds in sums.seconds.items() if seconds}


def test_what_a_kill_cost(tmp_path: Path) -> None:
    sums = read(tmp_path, KILLED)
    assert (sums.steps_kept, sums.steps_lost, sums.images_kept) == (75, 15, 75 * 16)
    assert spent(sums) == {
        "start": 11.0, "step kept": 15 * 25 / 30 + 20, "step lost": 15 * 5 / 30 + 8, "save": 4.0,
        "unknown": 2.0, "stop": 20.0 + 1.0,
    }  # fmt: skip
    assert [(one.resumed, one.steps_kept, one.steps_lost, one.outcome) for one in sums.starts] == [
        (0, 25, 15, "exit code 137"),
        (25, 50, 0, "done"),
    ]
    assert sums.goodput == pytest.approx(32.5 / 81)
    assert sums.gpu_hours == pytest.approx(2 * (30 + 31) / 3600), "between the starts no GPU is held"


def test_an_old_record_of_sampling_is_read(tmp_path: Path) -> None:
    sums = read(tmp_path, [start(100), resume(104, 0), time(100, 120, 30, start=5.0, drawing=3.0), left(120, 30)])
    assert spent(sums) == {"start": 5.0, "sampling": 3.0, "step kept": 12.0}


def test_a_step_that_was_interrupted_is_lost_and_callbacks_follow_a_step(tmp_path: Path) -> None:
    head = KILLED[:3]
    sums = read(tmp_path, [*head, gone(130, 30, 128, "backward")])
    assert (sums.steps_kept, sums.steps_lost, spent(sums)["step lost"]) == (30, 0, 8.0)
    sums = read(tmp_path, [*head, gone(130, 30, 128, "callbacks")])
    assert (sums.steps_kept, sums.steps_lost) == (31, 0), "the beat has the steps before the one that was taken"
    sums = read(tmp_path, [*head[:2], gone(130, 0, 128, "start")])
    assert spent(sums) == {"start": 28.0, "unknown": 2.0}


def test_the_time_of_a_hang_is_unknown(tmp_path: Path) -> None:
    hung = gone(1930, 30, 128, "callbacks", code=69)
    assert spent(read(tmp_path, [*KILLED[:3], hung]))["unknown"] == 1802.0
    at_the_end = read(tmp_path, [*KILLED[:3], left(121, 30), hung])  # rank 0 had closed the run, others hung
    assert (spent(at_the_end)["stop"], spent(at_the_end)["unknown"]) == (1.0, 1809.0)
    assert at_the_end.starts[0].outcome == "done"
    orderly = read(tmp_path, [*KILLED[:3], left(121, 30), gone(123, 30, 120, "callbacks", code=0)])
    assert spent(orderly) == {"start": 5.0, "step kept": 15.0, "stop": 3.0}


def test_without_a_supervisor_the_log_knows_the_steps_and_the_rest_is_unknown(tmp_path: Path) -> None:
    again = [start(150, logged=[40, 128.0]), resume(155, 25), time(150, 180, 75, start=6.0), left(180, 75)]
    sums = read(tmp_path, [*KILLED[:3], *again])
    assert (sums.steps_lost, spent(sums)["unknown"]) == (15, 22.0)
    assert spent(sums)["step lost"] == 15 * 5 / 30 + 8
    assert sums.starts[0].outcome == "killed"
    before_the_resume = start(200, logged=[40, 128.0])  # after a start that did not come to cut the log back
    assert read(tmp_path, [*KILLED[:3], *again[:2], before_the_resume]).steps_lost == 15


def test_a_rewind_loses_steps_that_are_not_taken_again(tmp_path: Path) -> None:
    rewind = {"event": "rewind", "at": 130, "step": 60, "to": 50}
    events = [
        start(100), resume(104, 0), time(100, 130, 60, start=6.0), rewind,
        time(130, 150, 80, rewind=10.0), left(150, 80),
    ]  # fmt: skip
    sums = read(tmp_path, events)
    assert (sums.steps_kept, sums.steps_lost) == (70, 10)
    assert spent(sums) == {"start": 6.0, "step kept": 20.0 + 10.0, "step lost": 4.0 + 10.0}
    sums = read(tmp_path, [*events, start(160), resume(161, 40)])
    assert (sums.steps_kept, sums.steps_lost) == (40, 40), "a fall-back behind the rewind counts no step twice"


def test_the_queue_of_a_job_is_told_from_its_stop(tmp_path: Path) -> None:
    sums = read(tmp_path, [*KILLED[:4], start(150, submitted=135.0, job_start=146.0)])
    assert spent(sums)["queue"] == 11.0
    assert (spent(sums)["stop"], spent(sums)["unknown"]) == (5.0, 2.0)
    assert spent(sums)["start"] == 5.0 + 4.0, "the job ran before its supervisor"
    assert sums.gpu_hours == pytest.approx(2 * (30 + 4) / 3600)
    first = read(tmp_path, [start(100, submitted=10.0, job_start=90.0), resume(104, 0), time(100, 120, 30, start=5.0)])
    assert spent(first) == {"start": 15.0, "step kept": 15.0}
    assert first.gpu_hours == pytest.approx(2 * 30 / 3600), "also of the first start"
    sums = read(tmp_path, [*KILLED[:4], start(150, submitted=100.0, job_start=146.0)])
    assert spent(sums)["queue"] == 16.0, "submitted while the one before ran"


def test_a_clock_that_is_set_back_counts_no_second_twice(tmp_path: Path) -> None:
    assert read(tmp_path, [*KILLED[:4], start(115), resume(116, 25), time(115, 145, 75), left(145, 75)]).wall_s == 45


@pytest.mark.fault(28)
@pytest.mark.parametrize("seed", range(40))
def test_damaged_lines_are_survived(tmp_path: Path, seed: int) -> None:
    """Lines lost, cut, not UTF-8, of other types or nested deep: the rest still adds up to its time."""
    draw = random.Random(seed)
    lines = [json.dumps(event).encode() for event in KILLED[1:]]
    for _ in range(3):
        number = draw.randrange(len(lines))
        line = lines[number]
        lines[number] = draw.choice(
            [b"", line[: len(line) // 2], line.replace(b"e", b"\xff"), line.replace(b"1", b'"x"'), b"[" * 10**5,
             line.replace(b":", b": null, ", 1), line.replace(b".0", b"e999"), b'{"step": 1, "event": [1]}']
        )  # fmt: skip
    (tmp_path / "ledger.jsonl").write_bytes(b"\n".join([json.dumps(KILLED[0]).encode(), *lines]))
    sums = read_ledger(tmp_path)
    assert sum(sums.seconds.values()) == pytest.approx(sums.wall_s)
    assert min(sums.seconds.values()) >= 0
    assert stragglers(sums) == []


def test_a_lost_line_is_unknown_time(tmp_path: Path) -> None:
    events = [start(100), resume(104, 0), time(100, 120, 30), time(120, 140, 60), time(140, 160, 90)]
    whole, without = read(tmp_path, events), read(tmp_path, [*events[:3], events[4]])
    assert (whole.steps_kept, without.steps_kept) == (90, 90)
    assert spent(without)["unknown"] == 20.0


def test_seconds_that_do_not_add_up_are_scaled_to_their_time(tmp_path: Path) -> None:
    """As after a bit flipped in a digit."""
    wrong = time(100, 120, 30) | {"seconds": {"step": 90.0, "save": 30.0}}
    assert spent(read(tmp_path, [start(100), resume(100, 0), wrong])) == {"step kept": 15.0, "save": 5.0}
    empty, negative = wrong | {"seconds": {}}, wrong | {"seconds": {"step": -90.0, "save": 110.0}}
    assert spent(read(tmp_path, [start(100), resume(100, 0), empty])) == {"unknown": 20.0}
    assert spent(read(tmp_path, [start(100), resume(100, 0), negative])) == {}


@pytest.mark.fault(28)
@pytest.mark.parametrize("wrong", [{"step": float("nan")}, {"watts": "much"}, {"slowest": {"rank": 2}}])
def test_a_record_with_one_wrong_field_counts_nothing(tmp_path: Path, wrong: Event) -> None:
    """Here one whose other fields are read before it or behind it; its time is not counted twice."""
    damaged = time(120, 140, 60, save=5.0) | wrong
    sums = read(tmp_path, [start(100), resume(100, 0), time(100, 120, 30), damaged, time(140, 160, 90)])
    assert spent(sums) == {"step kept": 40.0, "unknown": 20.0}


def test_a_rewind_without_its_step_and_an_end_without_its_time_change_nothing(tmp_path: Path) -> None:
    rewind = {"event": "rewind", "at": 120, "step": float("nan"), "to": 10}
    end = gone(130, 40, 128, "forward") | {"at": None}
    sums = read(tmp_path, [*KILLED[:3], rewind, end])
    assert (sums.steps_kept, sums.steps_lost, sums.starts[0].outcome) == (30, 0, "")


def test_no_ledger_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no ledger\.jsonl with a start"):
        read_ledger(tmp_path)


def test_costs_nodes_and_stragglers(tmp_path: Path) -> None:
    late = {"rank": 1, "late_s": 3.0, "others_s": 10.0}
    events = [
        start(0, nodes=["a", "b"]), resume(1, 0), time(0, 1800, 1000, slowest=late, watts=500.0),
        time(1800, 3600, 2000, slowest=late, watts=300.0), left(3600, 2000),
    ]  # fmt: skip
    sums = read(tmp_path, events)
    assert stragglers(sums) == [Straggler(1, 1, "b", 6.0, pytest.approx(0.3), pytest.approx(6 / 3600))]
    assert [(node.name, node.gpu_hours, node.late_s) for node in nodes(sums)] == [("a", 1.0, 0), ("b", 1.0, 6.0)]
    cost = costs(sums, 2.5, None)
    assert (cost.dollars, cost.kwh, cost.is_measured) == (5.0, pytest.approx(0.8), True)
    assert cost.per_million(cost.dollars) == pytest.approx(5.0 / 32_000 * 1e6)
    assert costs(sums, None, 700.0).kwh == pytest.approx(1.4), "the given power takes the place of the measured one"


def test_the_writer_and_the_reader_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a line that a kill has cut off; with what Slurm tells."""
    (tmp_path / "ledger.jsonl").write_text('{"event": "start", "at"')
    for submitted in ("2026-01-02T03:04:05", "N/A"):
        monkeypatch.setenv(SUBMITTED, submitted)
        monkeypatch.setenv(JOB_START, "nan")
        monkeypatch.setenv(STARTED, "")
        with Ledger(open_ledger(tmp_path), ["a", "b"], 16) as ledger:
            ledger.resume(0)
            with ledger.steps():
                ledger.step_taken(3)
                ledger.note_ranks([1.0, 1.5], None)
                with ledger.account("save"), ledger.account("data wait"):
                    pass
                ledger.rewind(5, to=2)
    sums = read_ledger(tmp_path)
    assert [(one.steps_kept, one.steps_lost, one.outcome) for one in sums.starts] == [(0, 5, "done"), (2, 3, "done")]
    assert sum(sums.seconds.values()) == pytest.approx(sums.wall_s)
    assert [one.rank for one in stragglers(sums)] == [1, 1]
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()[1:]]
    assert [line["submitted"] is None for line in lines if line["event"] == "start"] == [False, True]
    for line in lines:
        if line["event"] == "time":
            assert sum(line["seconds"].values()) == pytest.approx(line["at"] - line["from"], abs=1e-4)


def test_a_record_of_the_time_has_all_seconds_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that moves whenever it is read."""
    clock = SimpleNamespace(perf_counter=itertools.count(0.0).__next__, time=lambda: 1e9)
    monkeypatch.setattr(writer, "time", clock)
    with Ledger(open_ledger(tmp_path), ["a"], 16) as ledger, ledger.steps():
        ledger.rewind(5, to=2)
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    records = [line for line in lines if line["event"] == "time"]
    assert len(records) == 2
    assert [sum(line["seconds"].values()) for line in records] == [line["at"] - line["from"] for line in records]


def test_records_of_the_time_become_rarer_with_the_age_of_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(writer, "time", SimpleNamespace(perf_counter=lambda: now, time=lambda: 1e9 + now))
    with Ledger(open_ledger(tmp_path), ["a"], 16) as ledger:
        for step in range(100_000):  # 3 s each
            now += 3.0
            ledger.step_taken(step)
            ledger.write_when_due()
    records = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert 5_000 / 6 < len(records) < 6_000, "every 6 s at first, every 300 s at the end; not 50,000"
    assert read_ledger(tmp_path).wall_s == pytest.approx(300_000.0)
