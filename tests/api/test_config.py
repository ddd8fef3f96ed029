"""Configurations as objects: presets, changes by name, YAML; all without torch."""

import copy
import json
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import fastdiff
from fastdiff.config.command_line.train_flags import parse
from fastdiff.config.presets import PRESETS
from fastdiff.config.run_record import as_json
from tests.support.processes import ROOT


def test_the_package_and_its_configurations_import_no_torch() -> None:
    code = "import sys, fastdiff; str(fastdiff.preset('digits', steps=3)); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0


def test_every_name_of_the_package_is_there() -> None:
    assert all(getattr(fastdiff, name) for name in fastdiff.__all__)
    assert set(dir(fastdiff)) == set(fastdiff.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = fastdiff.nope  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_those_of_the_command_line(name: str) -> None:
    config = fastdiff.preset(name)
    assert config.to_dict() == as_json(parse(["--preset", name])[1])
    assert fastdiff.Config.from_dict(config.to_dict()).to_dict() == config.to_dict()
    assert fastdiff.presets()[name]


def test_changes_are_those_of_the_flags(digits: Path) -> None:
    flags = ["--optim.lr", "3e-4", "--batch.samples", "32", "--data.path", str(digits), "--seed", "7"]
    changes: dict[str, Any] = {"optim": {"lr": 3e-4}, "batch": {"samples": 32}, "data": {"path": digits}, "seed": 7}
    for length in ("steps", "epochs"):
        flagged = parse(["--preset", "digits", *flags, f"--{length}", "5"])[1]
        assert fastdiff.preset("digits", **changes, **{length: 5}).to_dict() == as_json(flagged)


def test_epochs_of_images_for_online_encoding_are_counted(tmp_path: Path) -> None:
    for number in range(5):
        Image.new("RGB", (40, 40), (40 * number, 0, 0)).save(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.txt").write_text("a colour")
    data = {"path": tmp_path, "online": True, "max_samples": 3}
    config = fastdiff.preset("sd15-finetune", epochs=2, data=data, batch={"samples": 1})
    assert config.steps == 6
    assert config.data.online


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 2, "data": {"path": "nowhere"}}, "epochs 2: the size of nowhere is unknown, .* or use steps$"),
        ({"steps": 2, "samples": 64}, "samples and steps: each is the length"),
        ({"optim": {"lr": -1}}, r"optim\.lr -1\.0: above 0"),
    ],
)
def test_messages_name_fields(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(fastdiff.ConfigError, match=rf"^preset\('digits'\): {message}"):
        fastdiff.preset("digits", **changes)


def test_the_data_set_decides_the_network_as_on_the_command_line(tmp_path: Path) -> None:
    info = {"classes": 7, "columns": {"latent": {"shape": [1, 28, 28]}}}
    (tmp_path / "dataset.json").write_text(json.dumps(info))
    flags, data = ["--preset", "dit-small-images", "--data.path", str(tmp_path)], {"path": tmp_path}
    config = fastdiff.preset("dit-small-images", data=data)
    assert config.to_dict() == as_json(parse(flags)[1])
    assert (config.model.channels, config.model.size, config.model.classes) == (1, 28, 7)
    given = fastdiff.preset("dit-small-images", data=data, model={"classes": 3})
    assert given.to_dict() == as_json(parse([*flags, "--model.classes", "3"])[1])
    assert given.changed(seed=4).model == given.model
    assert fastdiff.preset("dit-small-images").changed(data=data).model == config.model


def test_copies_are_configurations() -> None:
    config = fastdiff.preset("digits")
    assert [copied.preset for copied in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)))] == ["digits"] * 2
    for copied in (copy.deepcopy(config), replace(config)):
        assert copied.to_dict() == config.to_dict()
        assert repr(copied)


def test_a_configuration_is_frozen_and_changes_in_copies() -> None:
    config = fastdiff.preset("digits")
    with pytest.raises(FrozenInstanceError):
        config.seed = 3  # type: ignore[misc]
    changed = config.changed(optim=replace(config.optim, lr=0.5), validation={"prompts": ()})
    assert (changed.optim.lr, config.optim.lr) == (0.5, 2e-3)
    assert changed.preset == "digits"
    assert replace(config, seed=4).to_dict() == config.changed(seed=4).to_dict()


def test_it_reads_and_writes_yaml(tmp_path: Path) -> None:
    config = fastdiff.preset("digits-adm", steps=7)
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    assert fastdiff.Config.from_file(tmp_path / "run.yaml").to_dict() == config.to_dict()
    assert as_json(parse(["--config", str(tmp_path / "run.yaml")])[1]) == config.to_dict()


def test_it_shows_what_was_chosen() -> None:
    shown = repr(fastdiff.preset("digits", steps=3, seed=5))
    assert shown.startswith("<Config of the preset digits, ")
    assert "steps: 3\n" in shown
    assert "seed: 5\n" in shown
    assert "depth: 4" in shown
    assert "weight_decay" not in shown


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim": {"lrr": 1.0}}, "unknown field optim.lrr; did you mean optim.lr?"),
        ({"optim": {"lr": "fast"}}, "optim.lr: Input should be a valid number"),
        ({"nope": 1}, "unknown field nope"),
        ({"steps": 3, "samples": 64}, "each is the length of the run"),
        ({"steps": 0}, "steps=0: expected a number above 0"),
        ({"steps": 1.5}, "steps=1.5: expected"),
        ({"batch": {"samples": 63}}, "nearest value: 64008"),
        ({"model": {"kind": "nope"}}, "model.kind: not a known network"),
        ({"model": {"kind": "nowhere.py:Net"}}, "nowhere.py cannot be read"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(fastdiff.ConfigError) as caught:
        fastdiff.preset("digits", **changes)
    assert message in str(caught.value)
