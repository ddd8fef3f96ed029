"""``--batch.micro auto``: chosen by memory, recorded, kept by a resume on as many ranks."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastdiff.config import deepspeed
from fastdiff.config.command_line import train_flags
from fastdiff.config.command_line.config_file import from_mapping
from fastdiff.config.presets import preset
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.config.sections.objective import FlowConfig
from fastdiff.console import log
from fastdiff.data.shards.format import Column, DatasetInfo, Normalisation, Provenance
from fastdiff.errors import ConfigError
from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from fastdiff.training.memory import micro_batch
from tests.support.forked import forked_ranks, values
from tests.support.nights import by_day
from tests.support.runs import hexes, launch, losses, newest, tiny

GIB = 2**30


def latents(config: RunConfig) -> DatasetInfo:
    """Return data as the preset expects them, fp16."""
    model = config.model
    shapes: dict[str, tuple[int, ...]] = {"latent": (model.channels, model.size, model.size)}
    shapes |= {name: shape for name, shape in model.conditions.items() if shape}
    ones = (1.0,) * model.channels
    return DatasetInfo(
        columns={name: Column(dtype="float16", shape=shape) for name, shape in shapes.items()},
        normalisation=Normalisation(shift=ones, scale=ones),
        provenance=Provenance(source="", transform=""),
    )


@pytest.mark.parametrize(
    ("gib", "ranks", "expected"),
    by_day([(76, 8, 64), (1, 1, 1)], (137, 1, 128), (36, 1, 16), (20, 1, 8)),  # of H100, none, H200, A100, RTX 3090
)
def test_the_memory_of_the_gpu_decides(gib: int, ranks: int, expected: int) -> None:
    config = preset("sd2-512")
    assert config.batch.micro == "auto"
    ds_config = deepspeed.resolve(None, config, ranks)
    device, room = torch.device("cuda"), gib * GIB
    found = micro_batch.largest(config, ds_config, latents(config), ranks, device, room)
    assert found == expected
    assert config.batch.samples % (found * ranks) == 0


def test_recomputation_leaves_room_for_more() -> None:
    config = preset("sd2-512")
    config = replace(config, performance=replace(config.performance, recompute=True))
    ds_config = deepspeed.resolve(None, config, 1)
    assert micro_batch.largest(config, ds_config, latents(config), 1, torch.device("cuda"), 36 * GIB) == 64


@pytest.mark.parametrize(("stage", "expected"), by_day([(3, 16)], (1, 32)))
def test_frozen_layers_save_less_than_trained_ones(stage: int, expected: int) -> None:
    """DeepSpeed's linear layers save as much as if all weights were trained."""
    config = preset("sd15-lora")
    config = replace(config, batch=replace(config.batch, samples=64), samples=64)
    ds_config = deepspeed.resolve(deepspeed.read(f"zero{stage}"), config, 1)
    assert micro_batch.largest(config, ds_config, latents(config), 1, torch.device("cuda"), 23 * GIB) == expected


def test_it_holds_whole_pairs_of_a_contrastive_loss() -> None:
    config = replace(preset("digits"), objective=FlowConfig(contrastive_weight=0.05))
    ds_config = deepspeed.resolve(None, config, 1)
    assert micro_batch.largest(config, ds_config, latents(config), 1, torch.device("cpu"), 0) == 2


def test_a_network_that_asks_for_values_needs_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    config = preset("sd2-512")

    def forward(*inputs: torch.Tensor, **condition: torch.Tensor) -> float:
        return inputs[1].sum().item()

    monkeypatch.setattr("fastdiff.models.unet.network.UNet.forward", lambda self, *given, **named: forward(*given))
    with pytest.raises(ConfigError, match=r"does not run without data \(DataDependent.*give a number"):
        micro_batch.largest(config, {}, latents(config), 1, torch.device("cuda"), 36 * GIB)


def test_a_bug_of_a_network_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    config = preset("sd2-512")

    def forward(*_: object, **__: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr("fastdiff.models.unet.network.UNet.forward", forward)
    with pytest.raises(TypeError, match="a bug"):
        micro_batch.largest(config, {}, latents(config), 1, torch.device("cuda"), 36 * GIB)


def micro_of(folder: Path) -> int:
    recorded = json.loads((folder / "run.json").read_text())
    micro = recorded["config"]["batch"]["micro"]
    assert recorded["deepspeed"]["train_micro_batch_size_per_gpu"] == micro
    assert newest(folder).manifest["config"]["batch"]["micro"] == micro
    assert isinstance(micro, int)
    return micro


def test_a_run_records_its_choice_and_keeps_it(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "run"
    train(tiny(digits, whole, batch=BatchConfig(samples=32, micro=16), samples=4 * 32), launch(1), world)
    auto = tiny(digits, folder, batch=BatchConfig(samples=32, micro="auto"), samples=2 * 32)
    train(auto, launch(1), world)
    assert micro_of(folder) == 16, "the most on a CPU"
    monkeypatch.setattr(micro_batch, "_MOST_ON_CPU", 4)  # another version would choose 4
    train(replace(auto, samples=4 * 32), launch(1), world)
    assert micro_of(folder) == 16
    assert hexes(losses(folder)) == hexes(losses(whole))


def test_a_choice_that_does_not_fit_is_made_again(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number of the user's, too; the micro-batch of a run without accumulation is the share of a rank."""
    config = tiny(digits, tmp_path, batch=BatchConfig(samples=32), samples=2 * 32)
    train(config, launch(1), world)
    automatic = replace(config, batch=BatchConfig(samples=32, micro="auto"))
    train(replace(automatic, samples=3 * 32), launch(1), world)
    assert micro_of(tmp_path) == 32, "kept, not 16, the most on a CPU"
    monkeypatch.setattr(micro_batch, "_room", lambda world: 0)
    said: list[str] = []
    monkeypatch.setattr(log, "warning", said.append)
    for steps in (4, 5):
        train(replace(automatic, samples=steps * 32), launch(1), world)
        assert micro_of(tmp_path) == 1
    assert len(said) == 1, "the second start keeps 1"
    assert re.match(r"--batch.micro auto: the 32 of the run .* has 0.00 GiB here: it continues with 1, ", said[0])


def test_the_encoders_of_online_data_need_their_room() -> None:
    config = preset("sd2-512")
    ds_config = deepspeed.resolve(None, config, 1)
    found = micro_batch.largest(
        config, ds_config, latents(config), 1, torch.device("cuda"), 36 * GIB, encoders=16 * GIB
    )
    assert found == 8, "as with 20 GiB"


def on_two(world: World, digits: Path, folder: Path) -> None:
    """Choose by the rank with the least memory."""
    real = micro_batch._room
    micro_batch._room = lambda world: real(world) if world.is_first else 0  # type: ignore[assignment]
    try:
        train(tiny(digits, folder, batch=BatchConfig(samples=32, micro="auto"), samples=4 * 32), launch(1), world)
    finally:
        micro_batch._room = real


def test_other_ranks_choose_again(world: World, digits: Path, tmp_path: Path) -> None:
    train(tiny(digits, tmp_path, batch=BatchConfig(samples=32, micro="auto"), samples=2 * 32), launch(1), world)
    assert micro_of(tmp_path) == 16
    values(forked_ranks(on_two, digits, tmp_path))
    assert micro_of(tmp_path) == 1
    assert len(losses(tmp_path)) == 4


def test_the_json_stays_open_until_the_device_is_known() -> None:
    config = replace(preset("sd2-512"), batch=BatchConfig(samples=2048, micro="auto"))
    resolved = deepspeed.resolve(None, config, 8)
    assert resolved["train_micro_batch_size_per_gpu"] == resolved["gradient_accumulation_steps"] == "auto"
    with pytest.raises(ConfigError, match=r"2048 is not divisible by 3 ranks"):
        deepspeed.resolve(None, config, 3)
    with pytest.raises(ConfigError, match=r'"train_batch_sizes": "auto", which fastdiff does not fill'):
        deepspeed.resolve({"train_batch_sizes": "auto", "another": "auto"}, config, 8)
    with pytest.raises(RuntimeError, match="before it has one"):
        config.batch.accumulation(8)
    with pytest.raises(ConfigError, match=r'--batch.micro with 8 ranks gives "auto"'):
        deepspeed.resolve({"train_micro_batch_size_per_gpu": 16}, config, 8)


def test_a_dry_run_says_what_is_still_open(capsys: pytest.CaptureFixture[str]) -> None:
    automatic = preset("sd2-512")
    for config, notes in ((automatic, 1), (replace(automatic, batch=BatchConfig(samples=64, micro=8)), 0)):
        train_flags.print_dry_run(config, deepspeed.resolve(None, config, 1))
        assert capsys.readouterr().out.count("a start decides them") == notes


def test_flag_and_file() -> None:
    _, config = train_flags.parse(["--preset", "digits", "--batch.micro", "auto"])
    assert config.batch.micro == "auto"
    _, config = train_flags.parse(["--preset", "sd2-512", "--batch.micro", "16"])
    assert config.batch.micro == 16
    assert from_mapping({"batch": {"micro": "auto"}}, "a file").batch.micro == "auto"
    with pytest.raises(ConfigError, match="micro"):
        from_mapping({"batch": {"micro": "most"}}, "a file")
