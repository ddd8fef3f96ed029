"""Names of classes, from the data set to the run, its pictures and the choice of classes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastdiff.parallel.world import World
from fastdiff.train import train
from tests.support.runs import launch, named, newest, tiny

NAMES = ("apple", "pear", "plum", "fig", "kiwi", "lime", "date", "nut", "bean", "corn")


@pytest.fixture(scope="module")
def trained(world: World, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose classes have names, and whose data are gone."""
    folder = tmp_path_factory.mktemp("named")
    data = named(digits, folder / "data", NAMES)
    train(tiny(data, folder / "run", steps=2), launch(0), world)
    data.rename(folder / "gone")
    return folder / "run"


def test_a_run_records_the_names_of_its_classes(trained: Path) -> None:
    assert json.loads((trained / "run.json").read_text())["class_names"] == list(NAMES)
    assert newest(trained).manifest["class_names"] == list(NAMES)
