"""The schema that editors get agrees with what ``--config`` takes."""

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError

from fastdiff.cli.main import main
from fastdiff.config.command_line import config_file
from fastdiff.config.presets import PRESETS, preset
from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import as_json
from fastdiff.config.sections.objective import DEFAULTS
from fastdiff.errors import ConfigError


@pytest.fixture
def validator(capsys: pytest.CaptureFixture[str]) -> Draft202012Validator:
    """Of what the command prints."""
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def read(content: dict[str, Any], folder: Path) -> RunConfig:
    """Return the run of a file, as ``--config`` does."""
    path = folder / "run.yaml"
    path.write_text(json.dumps(content))
    file = config_file.read(str(path))
    return config_file.lay_over(preset(file.preset) if file.preset else RunConfig(), file.fields, "--config")


def test_the_whole_configuration_of_every_preset_is_valid(validator: Draft202012Validator) -> None:
    for name in PRESETS:
        content = as_json(preset(name))
        validator.validate(content)
        del content["samples"]
        validator.validate(content | {"$schema": "./fastdiff.schema.json", "preset": name, "epochs": 2.5})
        content["optim"]["learning_rate"] = 1e-4
        with pytest.raises(ValidationError, match="learning_rate"):
            validator.validate(content)


@pytest.mark.parametrize(
    "content",
    [
        {"preset": "digits", "optim": {"lr": 1}, "model": {"size": 16}},
        {"model": {"kind": "unet", "attention_heads": [5, 10, 20, 20]}},
        {"objective": {"process": "flow", "path": "gvp"}},
        {"objective": {"process": "flow", "schedule": DEFAULTS["schedule"]}},
        {"preset": None, "samples": 256, "steps": None, "batch": {"samples": 256, "micro": "auto"}},
    ],
)
def test_what_is_read_is_valid(validator: Draft202012Validator, content: dict[str, Any], tmp_path: Path) -> None:
    read(content, tmp_path)
    validator.validate(content)


@pytest.mark.parametrize(
    "content",
    [
        {"modle": {}},
        {"preset": "digit"},
        {"model": {"kind": "dit", "attention_heads": [5]}},
        {"model": {"kind": "other"}},
        {"objective": {"process": "flow", "schedule": "sigmoid"}},
        {"optim": {"lr": "fast"}},
        {"steps": 0},
        {"steps": 10, "epochs": 1},
        {"samples": 256, "steps": 1},
        {"seed": None},
    ],
)
def test_what_is_refused_is_invalid(validator: Draft202012Validator, content: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        read(content, tmp_path)
    assert not validator.is_valid(content)


def test_a_network_of_a_file_has_fields_of_its_own(validator: Draft202012Validator) -> None:
    validator.validate({"model": {"kind": "nets/toy.py:Toy", "width": 8}})


def test_every_field_is_described(validator: Draft202012Validator) -> None:
    for name, section in validator.schema["$defs"].items():
        for field, schema in section["properties"].items():
            assert schema.get("description") or "const" in schema, f"{name}.{field}"
