"""What the processes of a run import: most of the time before the first step is that of its imports."""

import gc
import json
import os
import sys
from pathlib import Path

import pytest

from fastdiff.cli.compat.run import train_flags
from fastdiff.models.pretrained.tiny_pipeline import build
from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from tests.support.inputs.images import encode, natural
from tests.support.nights import by_day
from tests.support.processes import run
from tests.support.runs import flags, launch, losses, tiny

NOTE_AT_EXIT = """
import atexit, gc, os, pathlib, sys

def note():
    found = [*sys.modules, f"gc: {gc.isenabled()}"]
    pathlib.Path(os.environ["IMPORTED"], os.environ.get("RANK", "supervisor")).write_text("\\n".join(found))

if "IMPORTED" in os.environ:
    atexit.register(note)
"""
FASTDIFF = [sys.executable, "-c", "from fastdiff.cli.main import entry; entry()"]
ONLY_RANKS = {"torch", "deepspeed", "diffusers", "transformers", "PIL", "triton"}
NO_RUN = {"datasets", "matplotlib", "pandas", "sklearn", "tensorflow", "torchvision", "torch.utils.tensorboard"}
"""Imported by no run; the libraries of its encoders bring more of their own."""
NO_LATENTS = NO_RUN | {
    "accelerate", "bitsandbytes", "diffusers", "peft", "scipy", "transformers", "torch._inductor.compile_fx",
}  # fmt: skip


def imported(command: list[str], folder: Path) -> dict[str, set[str]]:
    """Run a command and return the modules that each process had imported at its end, by its rank or "supervisor"."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(NOTE_AT_EXIT)
    (folder / "imported").mkdir()
    path = os.pathsep.join([str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = run(command, PYTHONPATH=path, IMPORTED=str(folder / "imported"))
    assert done.code == 0, done.output
    return {note.name: set(note.read_text().splitlines()) for note in (folder / "imported").iterdir()}


def launch_local(*flags: str, ranks: int = 1) -> list[str]:
    return [*FASTDIFF, "launch", "local", "--ranks", str(ranks), "--", *flags]


@pytest.mark.parametrize("ranks", by_day([2], 1))
def test_a_run_on_latents(digits: Path, tmp_path: Path, ranks: int) -> None:
    """The supervisor is one process with the command; each rank imports what it uses.

    Without --ranks, `fastdiff train` starts one where no GPU is visible.
    """
    given = flags(tiny(digits, tmp_path / "run", steps=2))
    found = imported(launch_local(*given, ranks=ranks) if ranks > 1 else [*FASTDIFF, "train", *given], tmp_path)
    assert found.keys() == {"supervisor", *map(str, range(ranks))}
    assert found.pop("supervisor") & ONLY_RANKS == set()
    for modules in found.values():
        assert {"torch", "gc: True"} <= modules, "garbage is collected again once the run is built"
        assert ("deepspeed" in modules) == (ranks > 1), "one rank in fp32 has the flat engine"
        assert modules & NO_LATENTS == set()
    assert len(losses(tmp_path / "run")) == 2


def test_a_call_of_train_leaves_the_collector_as_it_is(digits: Path, tmp_path: Path, world: World) -> None:
    gc.disable()
    try:
        train(tiny(digits, tmp_path / "run", steps=1), launch(0), world)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.nightly
def test_a_run_on_images(tmp_path: Path) -> None:
    """Its encoders are diffusers' and transformers'."""
    images = tmp_path / "images"
    images.mkdir()
    for number in range(4):
        (images / f"{number}.png").write_bytes(encode(natural(40, 60, seed=number), "PNG"))
    rows = [json.dumps({"file_name": f"{number}.png", "text": f"picture {number}"}) for number in range(4)]
    (images / "metadata.jsonl").write_text("\n".join(rows))
    given = [
        "--pretrained_model_name_or_path", str(build(tmp_path / "pipeline")), "--train_data_dir", str(images),
        "--resolution", "32", "--train_batch_size", "2", "--max_train_steps", "2",
        "--output_dir", str(tmp_path / "run"),
    ]  # fmt: skip
    found = imported(launch_local(*train_flags("t2i", given)), tmp_path)
    assert found["supervisor"] & ONLY_RANKS == set()
    assert {"diffusers", "transformers"} <= found["0"]
    assert found["0"] & NO_RUN == set()
