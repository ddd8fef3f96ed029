"""The run that every test of this folder makes, and waiting for a step of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from subprocess import Popen

from tests.slurm.nodes import wait_for
from tests.support.runs import flags, tiny

STEPS = 150


def command_line(data: Path, folder: Path) -> list[str]:
    """Return the flags of the trainer: a tiny DiT on the digits under ZeRO-3, a checkpoint every ten steps."""
    config = tiny(data, folder, steps=STEPS, output__checkpoint_every=10)
    return [*flags(config), "--deepspeed_config", "deepspeed_configs/zero3.json"]


def steps(run: Path) -> int:
    """Return how many steps a run has logged."""
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def wait_for_step(run: Path, step: int, processes: Sequence[Popen[str]] = (), timeout_s: float = 240) -> None:
    """Wait until a run has logged a step; fail as soon as one of ``processes``, which make it, has ended."""

    def reached() -> bool:
        for process in processes:
            assert process.poll() is None, process.communicate()[0]
        return steps(run) >= step

    wait_for(reached, f"step {step} of {run}", timeout_s)
