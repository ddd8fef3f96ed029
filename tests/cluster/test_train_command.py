"""``fastdiff train``: what it refuses before it imports torch, and Ctrl-C."""

import json
import re
import signal
import sys
from pathlib import Path

import pytest

from fastdiff.parallel import preemption, visible_gpus
from tests.support.processes import run
from tests.support.runs import flags, intact, losses, tiny
from tests.support.scripts import COMMAND, Launcher, run_with_forks
from tests.support.supervised import Supervised, end
from tests.support.waiting import LIMIT_S, steps_logged, wait_until

_REFUSALS = """
import contextlib, io, json, sys
from fastdiff.cli.main import main

for words in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            code = main(words)
        except SystemExit as stopped:
            code = stopped.code
    heavy = sorted({"torch", "deepspeed", "transformers"} & sys.modules.keys())
    print(json.dumps([code, said.getvalue(), heavy]))
"""
_DIT = ["train", "--preset", "dit-xl-2-256"]


def test_what_files_and_flags_tell_is_told_before_torch_is_imported(digits: Path, tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    cases = [
        (["--version"], 0, "fastdiff 0."),
        (["trian", "--preset", "digits"], 2, "did you mean train?"),
        (["launch", "locl"], 2, "did you mean local?"),
        (["train"], 2, "--preset NAME (or --config FILE) is missing"),
        (["train", "--preset", "digist"], 2, "did you mean digits?"),
        (["train", "--preset", "digits", "--optim.lrr", "1"], 2, "--optim.lr"),
        (["train", "--preset", "digits", "--ranks", "0"], 2, "--ranks: 0: expected a whole number"),
        (["train", "--preset", "digits", "--ranks", "7", "--data.path", str(digits)], 2, "nearest values: 63, 70"),
        (_DIT, 65, "there is no such folder; make it with `fastdiff encode IMAGENET data/imagenet256 --pretrained "),
        ([*_DIT, "--data.path", str(tmp_path / "half")], 65, "no dataset.json, which is written last"),
        (
            [*_DIT, "--data.path", str(digits), "--model.size", "32", "--model.classes", "5"], 2,
            "use --model.channels 1 --model.size 8 --model.classes 10",
        ),
        (["train", "--preset", "digits", "--data.path", str(digits), "--model.classes", "5"], 2, "--model.classes 10"),
        (["launch", "local", "--ranks", "1", "--", "--preset", "digits", "--data.path", "no/where"], 65, "no/where"),
        (["train", "--preset", "digits", "--help"], 0, "--help-all lists all flags"),
        (["train", "--preset", "digits", "--data.path", str(digits), "--output.report-to", "wandb"], 2, "no API key"),
        (["bench", "--help"], 0, "count Inductor's code"),
        (["bench", "stpe"], 2, "did you mean step?"),
        (["train", "--preset", "digits", "--dry-run"], 0, '"folder": "runs/digits"'),
    ]  # fmt: skip
    nobody = {"HOME": str(tmp_path), "WANDB_API_KEY": "", "WANDB_MODE": "", "NETRC": ""}
    done = run([sys.executable, "-c", _REFUSALS, json.dumps([words for words, _, _ in cases])], **nobody)
    assert done.code == 0, done.output
    answers = [json.loads(line) for line in done.output.splitlines() if line.startswith("[")]
    for (words, code, message), (found, said, heavy) in zip(cases, answers, strict=True):
        assert found == code, (words, said)
        assert message in " ".join(said.split()), words
        assert heavy == [], words
    assert not (tmp_path / "runs").exists()


@pytest.mark.nightly
def test_ctrl_c_saves_and_another_length_resumes(digits: Path, tmp_path: Path) -> None:
    """The rest of so long a run is announced."""
    config = tiny(digits, tmp_path / "run", steps=1_000_000)
    command = [COMMAND, "train", *flags(config)]
    with Launcher(*command) as script:
        wait_until(lambda: not script.process.is_alive() or steps_logged(tmp_path / "run") >= 3, "step 3")
        assert script.process.is_alive(), script.wait().output
        script.send_signal(signal.SIGINT)
        done = script.wait(LIMIT_S)
    output = done.output
    assert done.code == 75, output
    (step,) = intact(tmp_path / "run")
    assert f"{tmp_path / 'run'}: 1,000,000 steps; starting 1 rank on the CPU" in output
    assert re.search(r"samples/s: about \d.* to go, until", output)
    assert preemption.STOPPING_LINE in output
    assert f"fastdiff: Ctrl-C: saved step {step}; the same command resumes from there" in output
    assert "error" not in output
    assert "Traceback" not in output

    place = command.index("--samples")
    again = run_with_forks(*command[:place], *command[place + 2 :], "--steps", str(step + 2))
    assert again.code == 0, again.output
    assert len(losses(tmp_path / "run")) == step + 2


def test_a_second_ctrl_c_ends_the_run_at_once(digits: Path, tmp_path: Path) -> None:
    """The rank is stopped, so it cannot have saved before."""
    job = Supervised(tmp_path / "run", flags(tiny(digits, tmp_path / "run", steps=100_000)), "--ranks-per-node", "1")
    try:
        job.wait_for_steps(3)
        job.rank(0).suspend()
        job.process.send_signal(signal.SIGINT)
        wait_until(lambda: preemption.STOPPING_LINE in job.output, "the answer to Ctrl-C")
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130
        assert job.last_line == preemption.INTERRUPTED_LINE
    finally:
        end([job])


@pytest.mark.parametrize(
    ("shown", "gpus"), [(None, 3), ("0,2", 2), ("1", 1), ("", 0), ("-1", 0), ("0,-1,1", 1), ("MIG-a,MIG-b", 2)]
)
def test_ranks_are_as_many_as_visible_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str | None, gpus: int
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(visible_gpus, "_NODES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert visible_gpus.visible_gpus() == gpus
