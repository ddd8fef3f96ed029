"""The stages of ``fastdiff demo``."""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from fastdiff.config.arguments.types import Subcommands, count, local_path
from fastdiff.console import show
from fastdiff.durations import in_words
from fastdiff.errors import FastdiffError, Preempted

_STEPS = 360
_REAL = "between halves of the real scans it is 0.04 to 0.06"


def add(commands: Subcommands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "demo",
        help="five minutes: train digits, kill a rank, resume, compare every bit, draw and measure",
        description="Trains digits twice: one run loses a rank to SIGKILL in the middle and resumes, the other is left "
        "alone. Then it compares all weights, averages and optimizer states bit by bit, measures the drawn digits and "
        "writes a report. Nothing is downloaded.",
    )
    parser.add_argument("--watch", action="store_true", help="open the page of the run in a browser")
    parser.add_argument("--steps", type=count, default=_STEPS, metavar="N", help="of a run; default: %(default)s")
    parser.add_argument("--data", type=local_path, default=Path("data/digits"), help="shards; default: %(default)s")
    parser.add_argument("--runs", type=local_path, default=Path("runs"), help="folder of both; default: %(default)s")
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="-- TRAIN FLAGS", help="flags of `fastdiff train`")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    flags = arguments.flags[1:] if arguments.flags[:1] == ["--"] else arguments.flags
    try:
        Demo(arguments.data, arguments.runs, arguments.steps, flags, watch=arguments.watch).run()
    except KeyboardInterrupt:
        raise Preempted("interrupted; the runs of the demo stay, and `fastdiff demo` begins new ones") from None


class Demo:
    """One demo."""

    def __init__(self, data: Path, runs: Path, steps: int, flags: Sequence[str], *, watch: bool) -> None:
        from fastdiff.cli.demo.training import Training

        names = (runs / f"demo-{number}" for number in itertools.count(1))
        self._run_folder = next(name for name in names if not name.exists())
        self._data, self._steps, self._watch = data, steps, watch
        part = max(1, steps // 6)
        common = [
            "--preset", "digits-fast", "--data.path", str(data), "--output.checkpoint-every", str(part),
            "--output.log-every", str(max(1, steps // 60)), *_equal_bits(), *flags,
        ]  # fmt: skip
        self._disturbed = Training(self._run_folder, [*common, "--output.sample-every", str(part)], steps)
        alone = self._run_folder.with_name(f"{self._run_folder.name}-undisturbed")
        self._alone = Training(alone, [*common, "--output.sample-every", "0"], steps)
        self._began = time.monotonic()

    def run(self) -> None:
        """Run all stages; FastdiffError if a stage failed, or bits differ."""
        with ExitStack() as stack:
            self._examine()
            self._encode()
            if self._watch:
                self._open_page(stack)
            self._train_and_kill()
            self._resume()
            self._train_undisturbed()
            self._compare()
            self._measure()
            self._report()
            show(f"\nDone in {in_words(time.monotonic() - self._began)}. Your turn: a recipe of docs/recipes/")

    def _examine(self) -> None:
        _title("This machine")
        found = _output("doctor")
        for line in found.splitlines():
            if line.startswith(("OK ", "PROBLEM")):
                show(line)

    def _encode(self) -> None:
        if (self._data / "dataset.json").exists():
            return
        _title("1,797 scans of handwritten digits become shards")
        _call("encode", "digits", str(self._data))

    def _open_page(self, stack: ExitStack) -> None:
        from fastdiff.cli.demo.training import FASTDIFF

        self._run_folder.mkdir(parents=True)
        page = subprocess.Popen([*FASTDIFF, "watch", str(self._run_folder), "--open"], stdin=subprocess.DEVNULL)
        stack.callback(page.wait)
        stack.callback(page.terminate)

    def _train_and_kill(self) -> None:
        from fastdiff.cli.demo.training import run_killed

        _title(f"A diffusion transformer learns the digits: {self._steps} steps, watched by a supervisor")
        show(run_killed(self._disturbed))

    def _resume(self) -> None:
        _title("The same command again resumes")
        self._disturbed.require_done(self._disturbed.run())
        show(f"Digits as they sharpened: {self._run_folder}/samples/")

    def _train_undisturbed(self) -> None:
        _title("The same run, left alone")
        self._alone.require_done(self._alone.run())

    def _compare(self) -> None:
        from fastdiff.cli.demo.bits import compare

        _title("Both, bit by bit")
        found = compare(self._disturbed.folder, self._alone.folder)
        show(
            f"{found.tensors} tensors with {found.numbers:,} numbers of step {found.step} (weights, their average and "
            f"the state of the optimizer): {found.bits:,} bits differ"
        )
        if found.bits:
            raise FastdiffError(f"{found.bits} bits differ between {self._disturbed.folder} and {self._alone.folder}")

    def _measure(self) -> None:
        _title("500 digits are drawn, and a classifier of real ones reads them")
        _call("evaluate", str(self._run_folder))
        found = json.loads((self._run_folder / "evaluation.json").read_text())
        show(f"accuracy {found['accuracy']:.3f}, Fréchet distance {found['frechet_distance']:.2f} ({_REAL})")

    def _report(self) -> None:
        _title("The whole story on one page")
        page = self._run_folder / "report.html"
        _call("report", str(self._run_folder), str(page))
        show(f"Open {page.resolve()}")


def _equal_bits() -> list[str]:
    """Return the flag with which runs on GPUs are equal to the bit; on a CPU they are anyway."""
    from fastdiff.parallel.visible_gpus import visible_gpus

    return ["--performance.deterministic"] if visible_gpus() else []


def _title(text: str) -> None:
    show(f"\n== {text}")


def _call(*words: str) -> None:
    """Run a command of fastdiff with its output here; FastdiffError if it failed, and has said why."""
    from fastdiff.cli.demo.training import FASTDIFF

    code = subprocess.run([*FASTDIFF, *words], check=False, stdin=subprocess.DEVNULL).returncode
    if code:
        raise FastdiffError(f"fastdiff {words[0]} ended with exit code {code}")


def _output(*words: str) -> str:
    from fastdiff.cli.demo.training import FASTDIFF

    done = subprocess.run([*FASTDIFF, *words], check=False, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
    return done.stdout
