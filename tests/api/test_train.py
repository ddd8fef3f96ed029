"""``fastdiff.train`` and ``fastdiff.Run`` in the way of users: whole runs, errors as exceptions, Ctrl-C."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import fastdiff
import fastdiff.train as trainer
from fastdiff.api.config import Config
from fastdiff.sampling.npz import read_npz
from tests.support.processes import ROOT, run
from tests.support.runs import hexes, losses, tiny
from tests.support.scripts import COMMAND, TRAIN, run_script
from tests.support.waiting import steps_logged, wait_for_the_end, wait_until

FIRST_USE = ROOT / "docs" / "first-use.ipynb"


@pytest.fixture(scope="module")
def trained(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> fastdiff.Run:
    folder = tmp_path_factory.mktemp("api") / "run"
    before, grouped = set(psutil.Process().children(recursive=True)), torch.distributed.is_initialized()
    run = fastdiff.train(Config.of(tiny(digits, folder, output__sample_every=3, output__sample_steps=2)))
    assert set(psutil.Process().children(recursive=True)) <= before, "it leaves no process"
    assert torch.distributed.is_initialized() == grouped, "the group of the ranks is theirs"
    return run


def test_the_call_trains_as_the_command_does(trained: fastdiff.Run, tmp_path: Path) -> None:
    assert callable(trainer), "the function, though its module hides it"
    (tmp_path / "run.yaml").write_text(trained.config.changed(output={"folder": str(tmp_path / "run")}).to_yaml())
    assert run_script(TRAIN, "--config", tmp_path / "run.yaml").code == 0
    assert hexes([record["loss"] for record in trained.metrics()]) == hexes(losses(tmp_path / "run"))


def test_a_run_tells_what_it_has(trained: fastdiff.Run) -> None:
    assert trained.checkpoints == [6]
    assert [record["step"] for record in trained.metrics()] == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in trained.grids] == ["step-00000003.png", "step-00000006.png"]
    assert trained.validation() == []
    assert trained.ledger(price=2.0)["steps_kept"] == 6
    assert trained.config.steps == 6
    assert "steps 6 of 6" in repr(trained)
    shown = trained._repr_html_()
    assert "data:image/png;base64," in shown
    assert "<polyline" in shown
    with pytest.raises(fastdiff.ConfigError, match="no run"):
        fastdiff.Run(trained.path.parent)


def test_drawn_images_are_those_of_the_command(trained: fastdiff.Run, tmp_path: Path) -> None:
    npz = tmp_path / "drawn.npz"
    done = run_script(COMMAND, "sample", trained.path, "--npz", npz, "--num", "5", "--steps", "3", "--batch", "2")
    assert done.code == 0, done.output
    expected, _ = read_npz(npz)
    drawn = trained.pixels(5, steps=3, batch=2, progress=False)
    assert torch.equal(drawn.permute(0, 2, 3, 1), torch.from_numpy(expected))
    pictures = trained.sample(5, steps=3, batch=2, progress=False)
    assert np.array_equal(np.stack([np.asarray(picture) for picture in pictures]), expected[..., 0])
    with pytest.raises(fastdiff.ConfigError, match="unknown arguments stepps"):
        trained.pixels(1, stepps=3)


def test_it_is_measured_and_exported(trained: fastdiff.Run, tmp_path: Path) -> None:
    reference = tmp_path / "real.npz"
    np.savez(reference, trained.pixels(8, steps=2, progress=False).permute(0, 2, 3, 1).numpy())
    (tmp_path / "own.py").write_text("def gap(a, b):\n    return {'mean': float(abs(a.mean() - b.mean()))}\n")
    own = f"{tmp_path / 'own.py'}:gap"
    found = trained.evaluate(reference, num=8, features="pixels", metrics=[own], steps=2, progress=False)
    assert found["fid"] == pytest.approx(0.0, abs=1e-6)
    assert found["gap.mean"] == 0.0
    assert "sha256" in found["metrics"]["gap"]
    assert trained.likelihood(samples=2, progress=False)["samples"] == 2
    out = trained.export(tmp_path / "weights", format="safetensors", raw=True)
    assert (out / "model.safetensors").is_file()


def test_errors_are_exceptions_with_their_message(trained: fastdiff.Run, tmp_path: Path) -> None:
    config = trained.config
    with pytest.raises(fastdiff.DataError, match=r"no data set.*fastdiff encode"):
        fastdiff.train(config.changed(data={"path": str(tmp_path / "nowhere")}))
    with pytest.raises(fastdiff.ConfigError, match=r"3 ranks|divisible|--batch.samples 16"):
        fastdiff.train(config, ranks=3)
    with pytest.raises(fastdiff.ConfigError, match=r"another configuration:\n  --seed: 0 -> 9\n"):
        fastdiff.train(config.changed(seed=9))
    (tmp_path / "own.py").write_text("class Ends:\n    def on_step(self, run):\n        raise KeyError('here')\n")
    own = [f"{tmp_path / 'own.py'}:Ends"]
    with pytest.raises(fastdiff.RunError, match=r"own.py:3: KeyError: 'here'"):
        fastdiff.train(config.changed(steps=12, output={"callbacks": own, "folder": str(tmp_path / "run")}))


@pytest.mark.nightly
def test_a_run_is_saved_when_its_caller_is_killed_and_at_ctrl_c_and_the_same_call_resumes(
    digits: Path, tmp_path: Path
) -> None:
    config = Config.of(tiny(digits, tmp_path / "run", steps=1_000_000))
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    code = f"import fastdiff; fastdiff.train(fastdiff.Config.from_file({str(tmp_path / 'run.yaml')!r}))"
    caller = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: steps_logged(tmp_path / "run") >= 3, "the first steps")
        processes = psutil.Process(caller.pid).children(recursive=True)
    finally:
        caller.kill()
        caller.wait()
    wait_for_the_end(processes)
    run = fastdiff.Run(tmp_path / "run")
    (saved,) = run.checkpoints

    watch = threading.Thread(target=_interrupt_after, args=(tmp_path / "run", saved + 3))
    watch.start()
    with pytest.raises(fastdiff.Preempted, match=r"saved step \d+; the same call resumes"):
        fastdiff.train(config)
    watch.join()
    assert run.checkpoints[-1] >= saved + 3
    assert [record["step"] for record in run.metrics()] == list(range(1, len(run.metrics()) + 1))


def _interrupt_after(folder: Path, steps: int) -> None:
    wait_until(lambda: steps_logged(folder) >= steps, "the first steps")
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.nightly
def test_the_notebook_of_the_first_use_runs(tmp_path: Path) -> None:
    """Every cell of the documentation, which has no outputs, in a real kernel: the view is live, without bars."""
    import nbformat

    notebook = nbformat.read(FIRST_USE, as_version=4)  # type: ignore[no-untyped-call]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    _execute(notebook, tmp_path)
    assert fastdiff.Run(tmp_path / "runs" / "first-use").checkpoints[-1] == 60
    assert (tmp_path / "first-use-weights" / "README.md").exists()
    shown = [output.data for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output]
    assert any("100 % of 60 steps" in html and "<polyline" in html for html in (d.get("text/html", "") for d in shown))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "done, 60 steps" in printed
    assert "%|" not in printed, "bars are in the view"
    assert any("image/png" in data for data in shown)
    assert any("frechet_distance" in data.get("text/plain", "") for data in shown)


def _execute(notebook: Any, folder: Path) -> None:
    """Execute all cells in a real kernel, with ``folder`` as the working directory."""
    from nbclient import NotebookClient

    NotebookClient(
        notebook,
        timeout=240,
        startup_timeout=240,
        iopub_timeout=240,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    ).execute()


def test_the_command_of_another_program_is_not_needed() -> None:
    """The ranks import this package even where only the caller's path has it."""
    from fastdiff.api.training import _environment

    done = run([sys.executable, "-c", "import fastdiff, fastdiff_kernels"], cwd=Path("/"), **_environment())
    assert done.code == 0, done.output
