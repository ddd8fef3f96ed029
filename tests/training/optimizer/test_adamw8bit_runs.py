"""8-bit moments: no number of ranks and no ZeRO stage changes a bit of them."""

import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastdiff.checkpoint.reader import Checkpoint
from fastdiff.config.launch_options import Launch
from fastdiff.config.run import RunConfig
from fastdiff.parallel.fragments import Flat, Fragment, owned_blocks
from fastdiff.parallel.world import World
from fastdiff.training.build import build
from fastdiff.training.checkpoints import Checkpoints
from fastdiff.training.loop import train
from fastdiff.training.optimizer.adamw8bit import create_state
from fastdiff_kernels.adamw8bit import BLOCK, AdamW8bit
from tests.support.processes import run_ranks
from tests.support.runs import assert_same_checkpoint, copy_run, hexes, launch, losses, newest, tiny, train_losses

CODES = ("exp_avg_codes", "exp_avg_sq_codes")
SCALES = ("exp_avg_scales", "exp_avg_sq_scales")


def config_of(digits: Path, folder: Path, steps: int) -> RunConfig:
    return tiny(digits, folder, steps=steps, optim__name="adamw8bit")


@dataclass(frozen=True)
class TwoRanks:
    """The run of two ranks."""

    start: Path
    """A run of three steps under ZeRO-3."""
    again: Path
    """The run of two ranks, loaded under every stage and saved again without a step."""
    losses: list[float]
    """Of the same run over six steps."""


@pytest.fixture(scope="module")
def two_ranks(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> TwoRanks:
    folder = tmp_path_factory.mktemp("two")
    return run_ranks(train_on_two, digits, folder, ranks=2)[0]  # type: ignore[no-any-return]


def train_on_two(world: World, digits: Path, folder: Path) -> TwoRanks:
    losses = train_losses(world, config_of(digits, folder / "whole", 6), launch(3))
    train(config_of(digits, folder / "start", 3), launch(3), world)
    save_again(world, digits, folder / "start", folder / "again")
    return TwoRanks(folder / "start", folder / "again", losses)


def save_again(world: World, digits: Path, start: Path, folder: Path) -> None:
    for stage in range(4):
        run = folder / str(stage)
        copy_run(world, start, run)
        with ExitStack() as stack:
            state = build(config_of(digits, run, 9), launch(stage), world, stack).state
            checkpoints = Checkpoints(run / "again" / "checkpoints", 2, world)
            checkpoints.commit(checkpoints.draft(state))


def moments(saved: Checkpoint) -> dict[str, Tensor]:
    """Codes and scales of every parameter, whole."""
    found = {}
    for name, shape in saved.manifest["parameters"].items():
        numel = torch.Size(shape).numel()
        for kind in (*CODES, *SCALES):
            entries = -(-numel // BLOCK) if kind in SCALES else numel
            found[f"{kind}/{name}"] = saved.slice(kind, Fragment(name, 0, entries, 0))
    return found


@pytest.mark.fault(23)
@pytest.mark.parametrize("ranks", [1, 2])
def test_moments_move_bitwise_to_other_ranks_and_stages(
    world: World, digits: Path, tmp_path: Path, two_ranks: TwoRanks, ranks: int
) -> None:
    """Written by two ranks under ZeRO-3, loaded and saved again under every stage."""
    again = two_ranks.again if ranks == 2 else tmp_path
    if ranks == 1:
        save_again(world, digits, two_ranks.start, again)
    expected = moments(newest(two_ranks.start))
    assert all(values.any() for key, values in expected.items() if "scales" in key)
    for stage in range(4):
        saved = newest(again / str(stage) / "again")
        found = moments(saved)
        assert (saved.manifest["zero_stage"], saved.manifest["world_size"]) == (stage, ranks)
        assert not saved.manifest["has_raw_state"]
        for key, values in expected.items():
            assert found[key].dtype == values.dtype
            assert torch.equal(found[key], values), (stage, key)


def test_two_zero3_ranks_go_on_as_one_rank_under_zero1(
    world: World, digits: Path, tmp_path: Path, two_ranks: TwoRanks
) -> None:
    shutil.copytree(two_ranks.start, tmp_path / "run")
    found = train_losses(world, config_of(digits, tmp_path / "run", 6), launch(1))
    assert found == pytest.approx(two_ranks.losses, rel=1e-5)


@pytest.mark.parametrize(
    ("stage", "precision"), [(0, "fp32"), (1, "bf16"), (2, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")]
)
def test_moments_are_those_of_the_clipped_gradient(
    world: World, digits: Path, tmp_path: Path, stage: int, precision: str
) -> None:
    """The scale of a block is its largest moment: after one step as under adamw, whoever multiplies by the factor."""
    saved = {}
    for name in ("adamw", "adamw8bit"):
        changes = {"optim__name": name, "optim__clip": 1e-3, "performance__precision": precision}
        train(tiny(digits, tmp_path / name, steps=1, **changes), launch(stage), world)
        saved[name] = newest(tmp_path / name)
    scales = moments(saved["adamw8bit"])
    for moment, power in (("exp_avg", 1.0), ("exp_avg_sq", 0.5)):
        for name, exact in saved["adamw"].full(moment).items():
            largest = [block.abs().max() ** power for block in exact.flatten().split(BLOCK)]
            torch.testing.assert_close(scales[f"{moment}_scales/{name}"], torch.stack(largest), rtol=1e-4, atol=0.0)


def test_every_block_is_saved_by_one_rank() -> None:
    """A parameter of 1000 elements, cut at elements 100 and 400: its blocks start at 0, 256, 512 and 768."""
    found, sizes = [], {"other": 256, "weight": 256}
    for start, numel in [(0, 100), (100, 300), (400, 600)]:
        key = torch.zeros(numel + 7)
        flat = Flat(key, {}, (Fragment("other", 0, 7, 0), Fragment("weight", start, numel, 7)), owned=True)
        _, touched = flat.blocks(sizes)
        assert touched.offset == 1, "behind the block of the other parameter"
        scales = torch.arange(touched.start - 1, touched.start + touched.numel)  # of each block, its number
        found += [
            (block.start, values.tolist())
            for block, values in owned_blocks([flat], [scales], sizes)
            if block.name == "weight"
        ]
    assert found == [(0, [0]), (1, [1]), (2, [2, 3])]


def test_offloaded_state_is_agreed_on_through_gloo(world: World) -> None:
    """NCCL, which connects ranks with GPUs, cannot read the host memory that ZeRO offloads to."""
    weight = torch.zeros(1000)
    optimizer = AdamW8bit([weight])
    flat = Flat(weight, optimizer.state, (Fragment("weight", 0, 1000, 0),), owned=True)
    groups = []
    for device in ("cpu", "cuda"):
        create_state(optimizer, [flat], World(rank=0, size=1, device=torch.device(device)))
        groups.append(optimizer._group)
    assert groups[0] is None, "the group of all ranks"
    assert groups[1] is not None
    assert torch.distributed.get_backend(groups[1]) == "gloo"


@pytest.mark.parametrize("stage", [2, 3])
def test_compiled_for_the_host_a_run_has_the_bits_of_the_reference(
    world: World, digits: Path, tmp_path: Path, stage: int
) -> None:
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    for kernels in ("reference", "adamw8bit=compile"):
        config = tiny(
            digits, tmp_path / kernels, optim__name="adamw8bit", performance__precision="bf16",
            performance__kernels=kernels,
        )  # fmt: skip
        train(config, Launch(deepspeed={"zero_optimization": zero}), world)
    reference, compiled = tmp_path / "reference", tmp_path / "adamw8bit=compile"
    assert hexes(losses(compiled)) == hexes(losses(reference))
    assert_same_checkpoint(compiled, reference)
