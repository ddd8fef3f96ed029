"""Training of an edit model on pictures with references: Flux.2-klein, from files to a run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastdiff.cli.main import main
from fastdiff.config.networks.flux2 import Flux2Config
from fastdiff.config.networks.pretrained import LoraConfig, PretrainedConfig
from fastdiff.config.presets import preset
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.config.sections.data import ValidationConfig
from fastdiff.config.sections.objective import FlowConfig
from fastdiff.data.loading.batches import Normaliser
from fastdiff.data.shards.reader import LatentReader
from fastdiff.errors import ConfigError
from fastdiff.models.load import pretrained
from fastdiff.models.lora import switch
from fastdiff.models.pretrained.pipeline import Pretrained
from fastdiff.parallel.world import World
from fastdiff.sampling.run import Run
from fastdiff.sampling.text import as_bytes, encode_prompts
from tests.support.forked import forked_ranks, values
from tests.support.inputs.captioned_pictures import in_grid
from tests.support.inputs.encoding import captioned, encode, picture
from tests.support.inputs.family_pipelines import TOKENS, family_pipeline, network_in
from tests.support.references.transformer_families import FAMILIES
from tests.support.runs import launch, tiny, train_losses

COUNT, STEPS = 6, 4


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_pipeline(tmp_path_factory.mktemp("pipelines") / "flux2", "flux2")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, pipeline: Path) -> dict[str, Path]:
    """Data sets with two references of each picture, with others, and with none."""
    folder = tmp_path_factory.mktemp("data")
    side = 8 * Pretrained(str(pipeline)).latent_space.factor
    after = captioned(folder / "after", [f"edit {number}" for number in range(COUNT)], [(side, side)] * COUNT)
    options: dict[str, Any] = {"resolution": side, "max_tokens": TOKENS["flux2"]}
    encode(after, folder / "none", pipeline, **options)
    for name, first in (("two", 100), ("others", 200)):
        (before := folder / f"before-{name}").mkdir()
        for number in range(COUNT):
            for which in range(2):
                picture(first + 10 * number + which, (side, side)).save(before / f"{number:03d}_{which}.png")
        encode(after, folder / name, pipeline, references=str(before), **options)
    return {name: folder / name for name in ("none", "two", "others")}


def run_of(pipeline: Path, data: Path, folder: Path, **changes: Any) -> RunConfig:
    network = network_in(pipeline).completed(FAMILIES["flux2"].config)
    options = {
        "objective": FlowConfig(convention="repa", condition_dropout=0.5),
        "model": network,
        "pretrained": PretrainedConfig(path=str(pipeline), weights=True, max_tokens=TOKENS["flux2"]),
        "samples": 4 * STEPS,
        "batch": BatchConfig(samples=4, micro=2),
        "optim__lr": 1e-3,
    }
    return tiny(data, folder, **options | changes)


def test_a_run_reads_the_references_of_its_data(
    tmp_path: Path, world: World, pipeline: Path, data: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """As many as there are, on any number of ranks and for a LoRA; other references are another training."""
    losses = {
        name: train_losses(world, run_of(pipeline, path, tmp_path / name), launch(0)) for name, path in data.items()
    }
    records = {name: json.loads((tmp_path / name / "run.json").read_text()) for name in data}
    assert {name: each["config"]["model"]["references"] for name, each in records.items()} == {
        "none": 0, "two": 2, "others": 2,
    }  # fmt: skip
    for one, other in (("two", "none"), ("two", "others")):
        assert losses[one][0] != pytest.approx(losses[other][0], rel=3e-6)
    shared = values(forked_ranks(train_losses, run_of(pipeline, data["two"], tmp_path / "ranks"), launch()))[0]
    assert shared == pytest.approx(losses["two"], rel=2e-6)
    adapted = run_of(pipeline, data["two"], tmp_path / "lora", lora=LoraConfig(rank=2), performance__recompute=True)
    assert train_losses(world, adapted, launch(0))[0] == pytest.approx(losses["two"][0], rel=2e-6)
    for name, told in (("none", False), ("two", True)):
        caplog.clear()
        Run(tmp_path / name).embedded(["edit 1"], negative=None)
        assert ("trained with 2 references of each picture" in caplog.text) == told
    run, before = Run(tmp_path / "two"), data["two"].parent / "before-two"
    given = [before / "000_0.png", before / "000_1.png"]
    condition, _ = run.embedded(["edit 0", "edit 1"], negative=None, references=given)
    assert "reference" not in run.embedded(["edit 0"], negative=None)[0]
    with LatentReader(data["two"]) as reader:
        stored = {name: torch.from_numpy(value) for name, value in reader.read([0]).items()}
        batch = Normaliser(reader.info, torch.device("cpu"))({**stored, "position": torch.zeros(1, dtype=torch.int64)})
    for row in condition["reference"]:
        torch.testing.assert_close(row, batch.condition["reference"][0], rtol=2e-3, atol=2e-3)
    flags = [word for file in given for word in ("--reference", str(file))]
    pictures = []
    for name, chosen in (("with", flags), ("swapped", [*flags[2:], *flags[:2]]), ("without", [])):
        grid = tmp_path / f"{name}.png"
        command = ["sample", str(tmp_path / "two"), "--prompt", "edit 0", "--per-prompt", "1", "--steps", "2"]
        assert main([*command, "--grid", str(grid), *chosen]) == 0
        pictures.append(grid.read_bytes())
    assert len(set(pictures)) == 3
    with pytest.raises(ConfigError, match=r"1 pictures by --reference: .* was trained with 2 references"):
        run.embedded(["edit 0"], negative=None, references=given[:1])


def test_references_that_do_not_fit_are_refused_or_told(
    tmp_path: Path, world: World, pipeline: Path, data: dict[str, Path]
) -> None:
    plain = run_of(pipeline, data["two"], tmp_path / "three")
    assert isinstance(plain.model, Flux2Config)
    three = replace(plain, model=replace(plain.model, references=3))
    with pytest.raises(ConfigError, match="has 2 references of each picture, the model takes 3"):
        train_losses(world, three, launch(0))
    held_out = ValidationConfig(data=str(data["none"]), every=1)
    with pytest.raises(ConfigError, match="has no references of each picture, the model takes 2"):
        train_losses(world, run_of(pipeline, data["two"], tmp_path / "held-out", validation=held_out), launch(0))


def drawn(run: Path, prompts: list[str], references: torch.Tensor, step: str) -> np.ndarray[Any, Any]:
    """What the validation shows: the pictures of prompts, by hand."""
    made = Run(run)
    if step == "base":
        switch(made.model, on=False)
    pipeline = pretrained(made.config.pretrained)
    condition, null = encode_prompts(pipeline, prompts, made.config.model, references=references)
    latents = made.sample(condition, null, made.sampler(steps=2))
    return as_bytes(pipeline.autoencoder().decode(latents)).permute(0, 2, 3, 1).numpy().astype(int)


@pytest.mark.parametrize("given", [False, True], ids=["captions", "files"])
def test_pictures_of_the_training_have_references(
    tmp_path: Path, world: World, pipeline: Path, data: dict[str, Path], given: bool
) -> None:
    """Those of the captions of the data, or files; in the pictures of the base model as well."""
    before, prompts = data["two"].parent / "before-two", ["edit 0", "edit 3"]
    files = tuple(str(before / f"{number:03d}_{which}.png") for number in (2, 4) for which in range(2)) if given else ()
    shown = ValidationConfig(
        prompts=("edit 0", "edit 3") if given else (), captions=2, references=files, every=STEPS, steps=2,
        images_per_prompt=1,
    )  # fmt: skip
    config = run_of(pipeline, data["two"], tmp_path / "run", validation=shown, lora=LoraConfig(rank=2))
    train_losses(world, config, launch(0))
    with LatentReader(data["two"]) as reader:
        rows = [
            {n: torch.from_numpy(v) for n, v in reader.read([row]).items()} for row in ((2, 4) if given else (0, 3))
        ]
        normalise, position = Normaliser(reader.info, torch.device("cpu")), torch.zeros(1, dtype=torch.int64)
        references = torch.cat([normalise({**row, "position": position}).condition["reference"] for row in rows])
    found = in_grid(tmp_path / "run" / "samples" / f"step-{STEPS:08d}.png")
    assert list(found) == ["base", f"step {STEPS}"]
    for column, pictures in found.items():
        expected = drawn(tmp_path / "run", prompts, references, column)
        swapped = drawn(tmp_path / "run", prompts, references.flip(0), column)
        assert abs(pictures - expected).sum() < 0.2 * abs(pictures - swapped).sum(), column


def test_as_many_files_as_references(tmp_path: Path, world: World, pipeline: Path, data: dict[str, Path]) -> None:
    file = str(data["two"].parent / "before-two" / "000_0.png")
    shown = ValidationConfig(prompts=("edit 0", "edit 3"), references=(file,) * 3, every=STEPS)
    with pytest.raises(
        ConfigError, match=r"3 files of --validation.references: expected 2, .* or 4, for the 2 prompts"
    ):
        train_losses(world, run_of(pipeline, data["two"], tmp_path / "run", validation=shown), launch(0))
    with pytest.raises(ConfigError, match=r"--validation.references needs an edit model; a UNet of Stable Dif"):
        replace(preset("sd15-lora"), validation=shown)
    with pytest.raises(ConfigError, match=r"--validation.references needs --validation.prompts or"):
        ValidationConfig(references=(file,))
