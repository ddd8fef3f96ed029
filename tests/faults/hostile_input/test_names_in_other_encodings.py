"""Names that are no UTF-8: those of source files are taken, and a run whose records cannot hold one is refused."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastdiff.config.command_line.config_file import lay_over
from fastdiff.config.presets import preset
from fastdiff.config.run import RunConfig
from fastdiff.errors import ConfigError
from tests.support.scripts import COMMAND, TRAIN, run_script, run_with_forks

LATIN = os.fsdecode(b"caf\xe9")
_RUN = [
    "--preset", "dit-small-images", "--steps", "1", "--model.depth", "1", "--model.hidden", "32", "--model.heads", "2",
    "--batch.samples", "4", "--output.sample-every", "0", "--validation.every", "0",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures of two classes, the names of one class and of a picture in Latin-1."""
    folder = tmp_path_factory.mktemp("latin")
    try:
        (folder / "pictures" / LATIN).mkdir(parents=True)
    except OSError:
        pytest.skip("the file system has UTF-8 names alone")
    (folder / "pictures" / "tea").mkdir()
    for name in (f"{LATIN}/0.png", f"tea/{LATIN}.png", "tea/1.png"):
        Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(folder / "pictures" / name)
    return folder


def test_pictures_and_classes_with_such_names_are_trained_on_and_drawn(place: Path) -> None:
    flags = ("--autoencoder", "identity", "--resolution", "16")
    done = run_with_forks(COMMAND, "encode", "pictures", "data", *flags, cwd=place)
    assert done.code == 0, done.output
    assert "3 pictures: all taken" in done.output
    assert json.loads((place / "data" / "dataset.json").read_text())["class_names"] == ["caf\\udce9", "tea"]
    done = run_with_forks(COMMAND, "train", *_RUN, "--data.path", "data", "--output.folder", "run", cwd=place)
    assert done.code == 0, done.output
    done = run_with_forks(COMMAND, "sample", "run", "--steps", "1", "--grid", "grid.png", cwd=place)
    assert done.code == 0, done.output
    assert "caf\\udce9, tea" in done.output


@pytest.mark.parametrize(
    "words",
    [
        ("train", *_RUN, "--data.path", LATIN), ("train", *_RUN, "--data.path", "data", "--output.folder", LATIN),
        ("encode", "pictures", LATIN, "--autoencoder", "identity", "--resolution", "16"),
        ("sample", "run", "--grid", f"{LATIN}.png"), ("export", "run", LATIN, "--format", "safetensors"),
        ("report", "run", f"{LATIN}.html"), ("plan", "--preset", "digits", "--gpu-file", LATIN),
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_no_command_takes_one_as_an_argument(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = run_with_forks(COMMAND, *words, cwd=tmp_path)
    assert done.code == 2
    (error,) = [line for line in done.output.splitlines() if " WARNING ignoring " not in line]
    assert "caf\\udce9" in error
    assert "no UTF-8, in which" in error
    assert not list(tmp_path.iterdir())


def test_a_rank_refuses_it_without_the_command(tmp_path: Path) -> None:
    done = run_script(TRAIN, *_RUN, "--output.folder", LATIN, cwd=str(tmp_path))
    assert done.code == 2, done.output
    assert "--output.folder caf\\udce9: no UTF-8" in done.output


def test_a_run_in_such_a_working_folder_is_refused_before_it_starts(place: Path) -> None:
    inner = place / LATIN
    inner.mkdir()
    done = run_with_forks(COMMAND, "encode", "digits", "data", cwd=inner)
    assert done.code == 0, done.output
    done = run_with_forks(COMMAND, "train", *_RUN, "--data.path", "data", "--output.folder", "run", cwd=inner)
    assert done.code == 2, done.output
    assert "caf\\udce9/run: no UTF-8" in done.output
    assert not (inner / "run").exists()


@pytest.mark.parametrize("field", ["data.path", "output.folder", "validation.prompts"])
def test_a_configuration_has_no_such_text(field: str) -> None:
    config = preset("digits")
    section, name = field.split(".")
    value = (LATIN,) if name == "prompts" else LATIN
    with pytest.raises(ConfigError, match=f"--{field} caf.*: no UTF-8"):
        replace(config, **{section: replace(getattr(config, section), **{name: value})})
    with pytest.raises(ConfigError, match=f"--config c.json: {field} caf.*: no UTF-8"):
        lay_over(RunConfig(), {section: {name: [LATIN] if name == "prompts" else LATIN}}, "--config c.json")


def test_a_python_that_reads_names_in_ascii_says_so(tmp_path: Path) -> None:
    environment = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PATH": os.environ["PATH"]}
    command = [sys.executable, "-m", "fastdiff", "verify", "für".encode()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "Python reads names as ascii here; set LC_ALL=C.UTF-8" in done.stderr
