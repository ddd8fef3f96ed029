"""Code outside the models asks the family of a network, never its type; another package can add a network."""

import ast
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import pytest
import torch
from safetensors.torch import load_file

from fastdiff.config.networks import registry as network_registry
from fastdiff.config.networks.registry import ModelConfig, network_called, networks, register
from fastdiff.errors import ConfigError
from fastdiff.export.formats import format_of, formats_of
from fastdiff.models.blockwise import BlockwiseModel
from fastdiff.models.build import build_model
from fastdiff.models.family import family_of
from fastdiff.parallel.world import World
from tests.support.installed.packages import install
from tests.support.processes import ROOT, Finished
from tests.support.runs import losses, newest
from tests.support.scripts import COMMAND, TRAIN, run_job, run_script

SOURCES = sorted((ROOT / "fastdiff").rglob("*.py"))
BASES = ("ModelConfig", "BlockwiseModel")


def derived(tree: ast.AST) -> set[str]:
    """Names of the configurations and networks that a module defines."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {c.name for c in classes if {ast.unparse(base) for base in c.bases} & set(BASES)}


def asked_by_type(tree: ast.AST, types: set[str]) -> Iterator[str]:
    """Code that asks which network there is: by one of its ``types``, or by the name of its kind."""
    for node in ast.walk(tree):
        asked: list[ast.AST] = []
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            asked = [*node.args[1:]]
        elif isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        names = {n.id for part in asked for n in ast.walk(part) if isinstance(n, ast.Name)}
        names |= {n.attr for part in asked for n in ast.walk(part) if isinstance(n, ast.Attribute)}
        if names & types:
            yield ast.unparse(node)
        if isinstance(node, ast.Attribute) and node.attr == "kind" and ast.unparse(node.value).endswith("model"):
            yield ast.unparse(node)


def test_nobody_asks_for_the_type_of_a_network() -> None:
    trees = {path: ast.parse(path.read_text()) for path in SOURCES}
    defined = {path: derived(tree) for path, tree in trees.items()}
    types = set(BASES).union(*defined.values())
    assert {"DiTConfig", "UNetConfig", "AdmConfig", "PixArtConfig", "DiT", "UNet", "AdmUNet", "PixArt"} < types
    others = [path for path in SOURCES if not defined[path] and not {"networks", "models"} & set(path.parts)]
    found = {(path.stem, code) for path in others for code in asked_by_type(trees[path], types)}
    # They lay values over the defaults of the kind, write it as a tag, or look for a user's code of that kind.
    assert found == {
        ("config_file", "base.model.kind"),
        ("model_card", "model.kind"),
        ("config", "config.model.kind"),
        ("config", "self.model.kind"),
        ("network", "config.model.kind"),
        ("run_record", "config.model.kind"),
        ("data_set", "model.kind"),
        ("summary", "model.kind"),
        ("plan", "config.model.kind"),
    }


@pytest.mark.parametrize(
    "code",
    [
        "isinstance(config.model, UNetConfig)",
        "isinstance(model, dit.DiT | AdmUNet)",
        "issubclass(kind, (int, AdmConfig))",
        "type(model) is DiT",
        "config.model.kind == 'unet'",
        "{'dit': 1}[model.kind]",
        "match model:\n    case DiTConfig(): pass",
        "match config.model.kind:\n    case 'dit': pass",
    ],
)
def test_every_way_to_ask_is_found(code: str) -> None:
    assert list(asked_by_type(ast.parse(code), {"DiT", "DiTConfig", "AdmUNet", "AdmConfig", "UNetConfig"}))


@pytest.mark.parametrize("kind", ["dit", "unet", "adm", "pixart"])
def test_a_family_is_of_its_configuration(kind: str) -> None:
    config = networks()[kind]()
    assert family_of(config).config is type(config)
    with torch.device("meta"):
        model = build_model(config)
    assert isinstance(model, BlockwiseModel)
    assert model.config == config


def test_every_format_that_a_family_names_is_there() -> None:
    found = {kind: list(formats_of(config)) for kind, config in networks().items()}
    assert found == {
        "dit": ["diffusers", "dit", "dit-training", "lora", "safetensors"],
        "unet": ["diffusers", "single-file", "lora", "lora-diffusers", "lora-native", "lora-kohya", "safetensors"],
        "adm": ["diffusers", "iddpm", "safetensors"],
        "pixart": ["diffusers", "lora", "safetensors"],
        "flux2": ["diffusers", "lora", "lora-diffusers", "lora-native", "lora-kohya", "safetensors"],
        "z-image": ["diffusers", "lora", "lora-diffusers", "lora-native", "lora-kohya", "safetensors"],
        "qwen-image": ["diffusers", "lora", "lora-diffusers", "lora-native", "lora-kohya", "safetensors"],
        "sd3": ["diffusers", "lora", "lora-diffusers", "lora-native", "lora-kohya", "safetensors"],
    }
    for kind, names in found.items():
        for name in names:
            form = format_of(networks()[kind](), name)
            assert form.adapter == name.startswith("lora")
            assert form.training == (name in ("dit-training", "iddpm"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Registered(ModelConfig):
    """A network without further fields."""

    kind: Literal["registered"] = "registered"
    channels: int = 1
    size: int = 8

    family: ClassVar[str] = "math:pi"
    title: ClassVar[str] = "a registered network"


def test_a_process_registers_a_network() -> None:
    assert register(Registered) is Registered
    assert register(Registered) is Registered, "once more is no other one"
    assert networks()["registered"] is Registered
    assert list(networks())[:4] == ["dit", "unet", "adm", "pixart"]
    with pytest.raises(ConfigError, match=r"math:pi is a float, expected the ModelFamily"):
        family_of(Registered())


def test_two_networks_of_one_kind_are_refused() -> None:
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Other(Registered):
        kind: Literal["dit"] = "dit"  # type: ignore[assignment]

    with pytest.raises(ConfigError, match=r"two networks have the kind 'dit': .*DiTConfig and .*Other; rename one"):
        register(Other)


def test_a_configuration_without_a_kind_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Nameless(ModelConfig):
        channels: int = 1
        size: int = 8

    with pytest.raises(ConfigError, match="needs a field kind with its name as the default"):
        register(Nameless)


def installed(site: Path, entry: str) -> Path:
    """A folder for PYTHONPATH with the toy network."""
    return install(site, "toy_network", {"fastdiff.networks": f"toy = {entry}"})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("toy_network.nowhere:ToyConfig", r"the network toy of toy-network cannot be imported \(No module .*nowhere"),
        (
            "fastdiff.config.networks.dit:DiTConfig",
            "the network toy of toy-network registers dit, which is of fast",
        ),
    ],
)
def test_an_installed_network_that_cannot_be_used_is_named(
    entry: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed(tmp_path, entry))
    monkeypatch.setattr(network_registry, "_installed", network_registry._installed.__wrapped__)
    assert list(networks())[:4] == ["dit", "unet", "adm", "pixart"], "it stops only runs that name it"
    with pytest.raises(ConfigError, match=message):
        network_called("toy", "--config x")


@pytest.mark.nightly
def test_a_network_from_another_package_trains_resumes_samples_and_is_exported(
    world: World, digits: Path, tmp_path: Path
) -> None:
    """On two ranks with ZeRO-3 and then on one; nothing of fastdiff knows it."""
    site, folder, out = installed(tmp_path / "site", "toy_network.config:ToyConfig"), tmp_path / "run", tmp_path / "out"
    (tmp_path / "toy.yaml").write_text("model: {kind: toy, hidden: 16}\noptim: {schedule: constant, warmup_steps: 0}\n")
    flags = [
        "--preset", "digits", "--config", tmp_path / "toy.yaml", "--model.hidden", "24", "--data.path", digits,
        "--batch.samples", "16", "--output.folder", folder, "--output.log-every", "1", "--output.sample-every", "3",
        "--output.sample-steps", "2", "--deepspeed_config", "deepspeed_configs/zero3.json",
    ]  # fmt: skip

    def ended(finished: Finished) -> str:
        assert finished.code == 0, finished.output
        return finished.output

    def fastdiff(*words: str | Path) -> Finished:
        return run_script(COMMAND, *words, PYTHONPATH=str(site))

    ended(run_job(TRAIN, *flags, "--samples", "48", ranks=2, PYTHONPATH=str(site)))
    assert "resuming from step 3" in ended(run_job(TRAIN, *flags, "--samples", "64", ranks=1, PYTHONPATH=str(site)))
    assert len(losses(folder)) == 4
    assert all(map(math.isfinite, losses(folder)))
    assert json.loads((folder / "run.json").read_text())["config"]["model"]["hidden"] == 24
    assert (folder / "samples" / "step-00000003.png").is_file()

    grid = tmp_path / "grid.png"
    ended(fastdiff("sample", folder, "--grid", grid, "--classes", "0-2", "--steps", "2"))
    assert grid.is_file()

    ended(fastdiff("export", folder, out, "--format", "safetensors", "--raw"))
    weights, trained = load_file(out / "model.safetensors"), newest(folder).weights()
    assert weights.keys() == trained.keys()
    assert all(torch.equal(weights[name], trained[name]) for name in weights)
    assert "A toy, trained with fastdiff." in (out / "README.md").read_text()
    ended(fastdiff("export", folder, tmp_path / "own", "--format", "toy"))
    assert (tmp_path / "own" / "names.txt").read_text().split("\n") == list(trained)

    refused = fastdiff("export", folder, tmp_path / "none", "--format", "dit")
    assert refused.code != 0
    assert "--format dit is for a DiT, the run has a toy network; use toy or safetensors" in refused.output
    unknown = run_script(COMMAND, "sample", folder, "--grid", grid)
    assert unknown.code != 0
    assert "model.kind: not a known network, given 'toy'; expected dit, unet, adm, pixart, or install" in unknown.output
