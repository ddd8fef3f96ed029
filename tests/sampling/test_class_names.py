"""Names of classes, from the data set to the run, its pictures and the choice of classes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import fastdiff
from fastdiff.checkpoint.manifest import MANIFEST
from fastdiff.cli.main import main
from fastdiff.console import log
from fastdiff.errors import ConfigError
from fastdiff.parallel.world import World
from fastdiff.sampling.class_names import ClassChoice, ClassNames
from fastdiff.sampling.image_grid import image_grid
from fastdiff.sampling.npz import read_npz
from fastdiff.training.loop import train
from tests.support.runs import FRUIT, launch, named, newest, renew_digest, tiny

IMAGENET = ("tench, Tinca tinca", "goldfish", "t-shirt", "ice cream", "goldfish, red", "red", "café")
LEXICAL = ("0", "1", "10", "11", "2", "3")
"""Folders in the order of their letters."""


@pytest.mark.parametrize(
    ("names", "choice", "numbers"),
    [
        (FRUIT, "plum", [2]),
        (FRUIT, "plum, apple,0-1,7", [2, 0, 0, 1, 7]),
        (FRUIT, ["plum", 0, "3"], [2, 0, 3]),
        ((), "0-2,7", [0, 1, 2, 7]),
        (IMAGENET, "tench, Tinca tinca", [0]),
        (IMAGENET, "t-shirt,tench, Tinca tinca,ice cream,goldfish", [2, 0, 3, 1]),
        (IMAGENET, "red,goldfish", [5, 1]),
        (IMAGENET, "cafe\u0301", [6]),
        (tuple(map(str, range(12))), "2,10-11", [2, 10, 11]),
        (("00", "01", "02"), "2,00", [2, 0]),
        (("1", "2", "3"), "1-3", [0, 1, 2]),
        (LEXICAL, "2", [4]),
        (LEXICAL, "0-3", [0, 1, 4, 5]),
        (LEXICAL, [2], [2]),
        (("3", "cat", "dog"), "2,3", [2, 0]),
    ],
)
def test_a_word_is_a_name_first_and_a_number_otherwise(
    names: tuple[str, ...], choice: ClassChoice, numbers: list[int]
) -> None:
    assert ClassNames(len(names) or 10, names).numbers(choice) == numbers


@pytest.mark.parametrize(
    ("names", "choice", "message"),
    [
        (FRUIT, "appel", "--classes appel: no such class; did you mean apple?"),
        (FRUIT, "Plum", "did you mean plum?"),
        (FRUIT, "plum,,fig", "no such class"),
        (FRUIT, "5-", "--classes 5-: no such class"),
        (FRUIT, "0-10", "--classes 0-10: no such class.*or numbers 0-9"),
        (FRUIT, [10], "--classes 10: no such class"),
        (FRUIT, [-1], "--classes -1: no such class"),
        (FRUIT, [1.5], "--classes 1.5: expected apple"),
        (FRUIT, [], "none are given"),
        (FRUIT, "0," * 100_000 + "0", "100001 classes, at most 100000"),
        ((), "plum", "trained with classes 0-9, which have no names"),
        ((), "0-" + "9" * 5000, "give them as 0-9 or 1,5,7"),
        ((), "0-" + "9" * 17, "give them as 0-9 or 1,5,7"),
        (IMAGENET, "goldfish, red", "the name of one class, or those of several; give numbers"),
        (("a", "b", "a"), "a", r"2 classes have this name; give their numbers: \[0, 2\]"),
        (LEXICAL, "4", "--classes 4: no such class"),
        (("1", "cat", "dog"), "0-1", "number 1 is the class cat, and the class named 1 has the number 0; give names"),
    ],
)
def test_what_is_no_class_is_refused(names: tuple[str, ...], choice: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClassNames(len(names) or 10, names).numbers(choice)


@pytest.mark.parametrize(("choice", "how"), [("2", "a name"), ("2-3", "a name"), ([2], "a number")])
def test_a_number_that_is_the_name_of_another_class_is_reported(
    choice: ClassChoice, how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "propagate", True)
    ClassNames(6, LEXICAL).numbers(choice)
    assert f"2 is taken as {how}" in caplog.text
    assert "number 2 is the class 10, and the class named 2 has the number 4" in caplog.text
    caplog.clear()
    ClassNames(12, tuple(map(str, range(12)))).numbers("0-11")
    assert not caplog.text


@pytest.fixture(scope="module")
def trained(world: World, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose classes have names, and whose data are gone."""
    folder = tmp_path_factory.mktemp("named")
    data = named(digits, folder / "data", FRUIT)
    train(tiny(data, folder / "run", steps=2, output__sample_every=2, output__sample_steps=2), launch(0), world)
    data.rename(folder / "gone")
    return folder / "run"


def test_a_run_records_the_names_of_its_classes(trained: Path) -> None:
    assert json.loads((trained / "run.json").read_text())["class_names"] == list(FRUIT)
    assert newest(trained).manifest["class_names"] == list(FRUIT)
    assert fastdiff.Run(trained).class_names == list(FRUIT)


def test_previews_have_the_names_of_their_columns(trained: Path) -> None:
    """Above the columns of the picture, and as the captions of TensorBoard."""
    without = image_grid(torch.zeros(80, 1, 8, 8), rows=8)
    with Image.open(trained / "samples" / "step-00000002.png") as picture:
        assert (picture.width, picture.height > without.height) == (without.width, True)
        assert picture.crop((0, 0, picture.width, picture.height - without.height)).histogram()[200:] != [0] * 56
    events = EventAccumulator(str(trained / "tensorboard"))
    events.Reload()
    assert {tag for tag in events.Tags()["images"] if tag.startswith("samples/")} == {f"samples/{n}" for n in FRUIT}


def test_classes_are_drawn_by_name(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "named.npz"
    few = ["sample", str(trained), "--steps", "2", "--per-class", "1"]
    assert main([*few, "--classes", "plum,0-1", "--grid", str(tmp_path / "grid.png")]) == 0
    assert "columns: plum, apple, pear" in capsys.readouterr().out
    assert main([*few, "--classes", "plum,fig", "--autoencoder", "identity", "--npz", str(out)]) == 0
    images, labels = read_npz(out)
    assert labels is not None
    assert labels.tolist() == [2, 3]
    run = fastdiff.Run(trained)
    drawn = run.pixels(classes=["plum", "fig"], per_class=1, steps=2, autoencoder="identity", progress=False)
    assert torch.equal(drawn, torch.from_numpy(images).permute(0, 3, 1, 2))
    with pytest.raises(ConfigError, match="did you mean plum"):
        run.sample(classes=["plumm"], autoencoder="identity")


def test_a_run_that_is_older_than_the_names_takes_those_of_its_data(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As long as the data are there and the same; otherwise its classes have numbers."""
    manifest = newest(trained).folder / MANIFEST
    content = json.loads(manifest.read_text())
    del content["class_names"]
    data = Path(content["config"]["data"]["path"])
    before = manifest.read_bytes()
    manifest.write_text(json.dumps(content))
    renew_digest(manifest)
    grid = ["--classes", "plum", "--grid", str(tmp_path / "grid.png")]
    wanted = ["sample", str(trained), "--steps", "1", "--per-class", "1", *grid]
    try:
        assert main(wanted) == 2
        assert "trained with classes 0-9, which have no names" in capsys.readouterr().err
        data.with_name("gone").rename(data)
        assert main(wanted) == 0
        assert "columns: plum" in capsys.readouterr().out
    finally:
        data.rename(data.with_name("gone"))
        manifest.write_bytes(before)
