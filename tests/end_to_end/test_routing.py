"""Runs that leave tokens out, with a contrastive term: ranks, a kill before the part with all tokens, guidance."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdiff.cli.main import main
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.data import ValidationConfig
from fastdiff.config.sections.objective import FlowConfig
from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.parallel.world import World
from fastdiff.sampling.run import Run
from fastdiff.training.loop import train
from tests.support.forked import forked_ranks, values
from tests.support.killed import train_killed
from tests.support.runs import assert_same_checkpoint, held_out, hexes, intact, launch, tiny, train_losses

STEPS = 6
MODELS = {
    "tread": DiTConfig(
        depth=4, hidden=32, heads=2, patch=2, channels=1, size=8, classes=10, routing="tread", routing_from=1,
        routing_to=2, dense_share=1 / 3,
    ),
    "sprint": DiTConfig(
        depth=4, hidden=32, heads=2, patch=2, channels=1, size=8, classes=10, norm="rms", rotary=True,
        value_residual=True, routing="sprint", routing_from=1, routing_to=2, path_drop=0.4, dense_share=1 / 3,
    ),
}  # fmt: skip


def config_of(digits: Path, folder: Path, name: str, micro: int = 6, **changes: Any) -> RunConfig:
    return tiny(
        digits, folder, steps=STEPS, batch__samples=12, samples=STEPS * 12, batch__micro=micro,
        output__checkpoint_every=1, model=MODELS[name], objective=FlowConfig(contrastive_weight=0.1), **changes,
    )  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_run_that_is_killed_goes_on_into_its_dense_part_equal_to_the_bit(
    digits: Path, tmp_path: Path, world: World, name: str
) -> None:
    """On two ranks with ZeRO-3. With other ranks, stages and micro-batches the losses are equal up to rounding."""
    whole = values(forked_ranks(train_losses, config_of(digits, tmp_path / "whole", name), launch()))[0]
    config = config_of(digits, tmp_path / "killed", name)
    ended = forked_ranks(train_killed, config)
    assert ended[1].code == -signal.SIGKILL, ended[1].trace
    assert intact(tmp_path / "killed")[0] <= 4, "killed before the dense part"
    assert config.dense_from == 4 * 12
    assert hexes(values(forked_ranks(train_losses, config, launch()))[0]) == hexes(whole)
    assert_same_checkpoint(tmp_path / "whole", tmp_path / "killed")
    alone = train_losses(world, config_of(digits, tmp_path / "alone", name, micro=12), launch(0))
    assert alone == pytest.approx(whole, rel=2e-5)
    three = values(forked_ranks(train_losses, config_of(digits, tmp_path / "three", name, micro=2), launch(2), ranks=3))
    assert three[0] == pytest.approx(whole, rel=2e-5)


def test_the_dense_part_and_lost_paths_change_the_losses(digits: Path, tmp_path: Path, world: World) -> None:
    """Equal before, other from there on."""
    found = {}
    for name, changes in {"as is": {}, "never": {"dense_share": 0.0}, "lost": {"path_drop": 0.9}}.items():
        config = config_of(digits, tmp_path / name, "sprint", micro=12)
        found[name] = train_losses(world, replace(config, model=replace(config.model, **changes)), launch(0))
    assert hexes(found["never"][:4]) == hexes(found["as is"][:4])
    assert found["never"][4] != found["as is"][4]
    assert found["lost"] != found["as is"]


def test_validation_and_sampling_take_all_tokens(digits: Path, tmp_path: Path, world: World) -> None:
    """The validation loss is that of the network called without scores; guidance leaves the path out where it says."""
    folder = tmp_path / "run"
    config = config_of(
        digits, folder, "sprint", micro=12, validation=ValidationConfig(data=str(held_out(digits)), every=STEPS),
        output__sample_every=STEPS, output__sample_steps=2,
    )  # fmt: skip
    train(config, launch(0), world)
    assert json.loads((folder / "validation.jsonl").read_text().splitlines()[-1])["val_loss"] > 0
    assert (folder / "samples" / f"step-{STEPS:08d}.png").is_file()
    assert main(["export", str(folder), str(tmp_path / "weights"), "--format", "safetensors"]) == 0
    told = "4 of 16 in blocks 1 to 2, without these blocks in 0.4 of the steps, all in the last 0.333 of the run"
    assert told in (tmp_path / "weights" / "README.md").read_text()
    run, calls = Run(folder, device=torch.device("cpu")), []
    forward = run.model.forward

    def noting(*inputs: Tensor, **condition: Tensor) -> Any:
        calls.append(condition)
        return forward(*inputs, **condition)

    run.model.forward = noting  # type: ignore[method-assign]
    drawn = run.draw(torch.tensor([3, 4]), SamplerConfig(steps=2, cfg=2.0), progress=False)
    assert torch.isfinite(drawn).all()
    assert calls
    for condition in calls:
        assert condition.keys() == {"label", "sparse_path"}
        assert condition["label"].tolist() == [3, 4, 10, 10]
        assert condition["sparse_path"].tolist() == [True, True, False, False]
