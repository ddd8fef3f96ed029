"""The faults that a run must survive, and the table of what tests saw.

``python -m tests.support.reports.fault_table XML ...`` writes it. Tests name the fault that they show with
``@pytest.mark.fault(N)``; reports are those of ``pytest --junitxml``.
"""

import datetime
import platform
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- faults: make test-faults -->", "<!-- end of faults -->"

FAULTS = {
    1: ("all ranks killed at random moments", "the resumed run is equal in every bit"),
    2: ("one rank killed at any file operation of a save", "a whole checkpoint is left, the resumed run is equal"),
    3: ("killed while old checkpoints are pruned", "at least one whole checkpoint is left"),
    4: ("power lost: what was not synced is gone", "the digests tell, an older checkpoint is taken"),
    5: ("a file of the newest checkpoint flipped, truncated or missing", "found before a weight changes; fall-back"),
    6: ("no checkpoint where one is expected", "an error, or what was asked for; never a silent new start"),
    7: ("disk full in a checkpoint", "says so; the old one is whole; goes on or exits 74, as configured"),
    8: ("disk full while encoding", "finished shards stay, the rest is resumed"),
    9: ("killed while encoding", "the same bytes in the end"),
    10: ("input/output error, failing fsync", "the file is named, the next save works"),
    11: ("slow storage", "training goes on, nothing times out"),
    12: ("SIGTERM, SIGUSR1 to a rank, a launcher, a job step", "one step saved by all, exit 75, nobody left"),
    13: ("a rank dies", "the others end; who and why is the last line"),
    14: ("a rank hangs", "found within the time-out, with all stacks"),
    15: ("network partition: short, for ever", "survived with equal losses; ended as a hang"),
    16: ("output closed, or its disk full", "dropped; the run goes on and is saved"),
    17: (
        "damaged, truncated, empty, missing shard; stale index",
        "named, or skipped and counted; never another tensor",
    ),
    18: ("missing component, wrong dtype or shape, key twice", "named"),
    19: ("shard replaced or truncated while open", "an error, no crash"),
    20: ("NaN in a latent, at one rank, in every batch", "skipped on all ranks with its key; stops after three"),
    21: ("loss spike", "log, skip or rewind, bounded, with the keys"),
    22: ("2 -> 1 -> 2 ranks in mid-epoch, AdamW", "the same samples, losses within 1e-6"),
    23: ("the same with 8-bit AdamW", "the same samples, losses within the measured bound"),
    24: ("asked to save inside accumulation", "saved at the boundary"),
    25: ("configuration changed at a resume", "refused with the differences"),
    26: ("averages under ZeRO-3, export, resume", "equal to full averages; no empty tensor is written"),
    27: ("two jobs in one folder, on one port", "the second is refused"),
    28: ("hostile files, names and settings", "nothing executed, memory bounded, no secret written"),
    29: ("tracker down or stalled", "training goes on, the records are kept"),
    30: ("soak of 10,000 steps, killed about every 200", "equal in every bit at the end (nightly)"),
    31: (
        "a rank out of memory in the midst of a step",
        "smaller micro-batches, losses and state within 1e-6; no rank waits",
    ),
}


@dataclass
class Seen:
    """Results of the tests of one fault."""

    passed: int = 0
    failed: int = 0
    trials: int = 0
    """Repetitions of all tests that repeat."""
    files: set[str] = field(default_factory=set)


def read_reports(reports: Iterable[Path]) -> dict[int, Seen]:
    """Return the results in pytest's XML reports by fault."""
    seen = {number: Seen() for number in FAULTS}
    for report in reports:
        for case in ET.parse(report).iter("testcase"):
            properties = [(p.get("name"), p.get("value") or "0") for p in case.iter("property")]
            for number in {int(value) for name, value in properties if name == "fault"}:
                found = seen[number]
                bad = case.find("failure") is not None or case.find("error") is not None
                found.failed += bad
                found.passed += not bad and case.find("skipped") is None
                found.trials += sum(int(value) for name, value in properties if name == "trials")
                found.files.add((case.get("classname") or "").rpartition(".")[2])
    return seen


def table(seen: dict[int, Seen]) -> str:
    """Return the Markdown table."""
    rows = ["| # | fault | what must hold | result | tests in |", "|---|---|---|---|---|"]
    for number, (fault, gate) in FAULTS.items():
        files = ", ".join(f"`{name}`" for name in sorted(seen[number].files))
        rows.append(f"| {number} | {fault} | {gate} | {_result(seen[number])} | {files} |")
    return "\n".join(rows)


def _result(found: Seen) -> str:
    if found.failed:
        return f"**{found.failed} of {found.failed + found.passed} tests failed**"
    if not found.passed:
        return "**not tested**"
    trials = f", {found.trials} trials" if found.trials else ""
    return f"{found.passed} test{'s' * (found.passed > 1)} passed{trials}"


def main(arguments: Sequence[str]) -> int:
    """Write the table of the given reports into the page; 1 if a fault failed or was not tested."""
    seen = read_reports(map(Path, arguments))
    head, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    when = f"Commit {commit.stdout.strip()}, {datetime.date.today()}, {platform.machine()}, CPU."
    PAGE.write_text(f"{head}{BEGIN}\n{when}\n\n{table(seen)}\n{END}{tail}")
    return int(any(found.failed or not found.passed for found in seen.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
