"""Optimizer state at a resume: bitsandbytes' blocks on other ranks, and checks of the parameter groups."""

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastdiff.checkpoint.bitsandbytes_state import BLOCK
from fastdiff.checkpoint.manifest import MANIFEST
from fastdiff.checkpoint.reader import FRAGMENTS
from fastdiff.checkpoint.unchanged import config_changes
from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import as_json
from fastdiff.errors import ConfigError
from fastdiff.files import file_digest
from fastdiff.parallel.fragments import Flat, assemble, layout_digest
from fastdiff.parallel.world import World
from fastdiff.training.build import build
from fastdiff.training.checkpoints import Checkpoints
from fastdiff.training.engines.base import Engine
from fastdiff.training.loop import take_steps
from fastdiff.training.optimizer.build import build_optimizer
from fastdiff.training.optimizer_state import check_groups
from tests.support.forked import forked_ranks, values
from tests.support.runs import copy_run, launch, newest, renew_digest, tiny

Moments = dict[str, dict[str, Tensor]]
"""By moment ("1", "2") and parameter."""


def blockwise_config(digits: Path, folder: Path) -> RunConfig:
    return tiny(digits, folder, steps=3, optim__name="adamw8bit-bnb")


def dequantized(flat: Flat, moment: str) -> Tensor:
    """In plain torch."""
    stored: Tensor = flat.state[f"state{moment}"].view(-1)
    if stored.dtype != torch.uint8:
        return stored
    scales: Tensor = flat.state[f"absmax{moment}"].repeat_interleave(BLOCK)[: stored.numel()]
    return flat.state[f"qmap{moment}"][stored.long()] * scales


def held(world: World, engine: Engine) -> Moments:
    """Return the state of all ranks together."""
    return {
        moment: assemble(world, engine.flats, [dequantized(flat, moment) for flat in engine.flats], engine.shapes)
        for moment in ("1", "2")
    }


def assert_rounded(flat: Flat, moment: str, truth: dict[str, Tensor], *, same_layout: bool) -> None:
    """Every value is the nearest in the table, times the largest of its block; in fp32, or as it was, it is exact."""
    expected = torch.zeros(flat.master.numel())
    for fragment in flat.fragments:
        part = truth[fragment.name].flatten()[fragment.start : fragment.start + fragment.numel]
        fragment.of(expected).copy_(part)
    stored = flat.state[f"state{moment}"].view(-1)
    if same_layout or stored.dtype != torch.uint8:
        assert torch.equal(dequantized(flat, moment), expected)
        return
    scales: Tensor = flat.state[f"absmax{moment}"]
    assert torch.equal(scales, torch.stack([block.abs().max() for block in expected.split(BLOCK)]))
    table = flat.state[f"qmap{moment}"]
    scaled = (expected / scales.repeat_interleave(BLOCK)[: expected.numel()]).nan_to_num()
    nearest = (scaled[:, None] - table).abs().amin(1)
    assert ((scaled - table[stored.long()]).abs() <= nearest + 1e-6).all()


def load_at_every_stage(world: World, digits: Path, start: Path, folder: Path, truth: Moments) -> None:
    """Load the run in ``start`` and compare its moments with ``truth``."""
    for stage in range(4):
        run = folder / f"{world.size}-{stage}"
        copy_run(world, start, run)
        with ExitStack() as stack:
            state = build(blockwise_config(digits, run), launch(stage), world, stack).state
            assert state.progress.steps == 3
            same_layout = layout_digest(world, state.engine.flats) == newest(start).manifest["layout"]
            for flat in state.engine.flats:
                assert flat.state["step"] == 3
                for moment in ("1", "2"):
                    assert_rounded(flat, moment, truth[moment], same_layout=same_layout)


def train_and_load(world: World, digits: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Two ranks under ZeRO-3 train, and load under every stage; as arrays, which outlive the process."""
    config = blockwise_config(digits, folder / "start")
    with ExitStack() as stack:
        run = build(config, launch(3), world, stack)
        state, batches, callbacks = run.state, run.batches, run.callbacks
        take_steps(state, batches, callbacks)
        callbacks.on_end(state)
        truth = held(world, state.engine)
    load_at_every_stage(world, digits, folder / "start", folder, truth)
    return {moment: {name: value.numpy() for name, value in named.items()} for moment, named in truth.items()}


@pytest.fixture(scope="module")
def blockwise(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Moments]:
    """The run of two ranks under ZeRO-3, and its moments."""
    folder = tmp_path_factory.mktemp("blockwise")
    arrays = values(forked_ranks(train_and_load, digits, folder))[0]
    return folder / "start", {
        m: {name: torch.from_numpy(a) for name, a in named.items()} for m, named in arrays.items()
    }


@pytest.mark.fault(23)
def test_moments_of_bitsandbytes_are_rounded_once_at_other_ranks_and_stages(
    world: World, digits: Path, tmp_path: Path, blockwise: tuple[Path, Moments]
) -> None:
    """From two ranks under ZeRO-3 (there to every stage of two ranks too), and from one rank under ZeRO-0."""
    start, truth = blockwise
    assert all(any(value.any() for value in named.values()) for named in truth.values())
    load_at_every_stage(world, digits, start, tmp_path / "from-two", truth)
    config = blockwise_config(digits, tmp_path / "start")
    with ExitStack() as stack:
        run = build(config, launch(0), world, stack)
        state, batches, callbacks = run.state, run.batches, run.callbacks
        take_steps(state, batches, callbacks)
        callbacks.on_end(state)
        kept = {flat.state["state1"].dtype for flat in state.engine.flats}
        assert kept == {torch.uint8, torch.float32}, "small parameters are not rounded there"
        truth = held(world, state.engine)
    load_at_every_stage(world, digits, tmp_path / "start", tmp_path / "from-one", truth)


@pytest.mark.fault(23)
def test_a_checkpoint_that_does_not_tell_its_layout_is_refused(
    world: World, digits: Path, tmp_path: Path, blockwise: tuple[Path, Moments]
) -> None:
    """As older ones do not; the same ranks and stage still load it (``test_train``)."""
    shutil.copytree(blockwise[0], tmp_path / "run")
    folder = newest(tmp_path / "run").folder
    manifest = json.loads((folder / MANIFEST).read_text())
    for name in manifest["files"]:
        with safe_open(folder / name, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys() if not key.startswith(FRAGMENTS)}  # noqa: SIM118
            metadata = file.metadata()
        save_file(tensors, folder / name, metadata)
        manifest["files"][name] = {"bytes": (folder / name).stat().st_size, "sha256": file_digest(folder / name)}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    renew_digest(folder / MANIFEST)
    with pytest.raises(ConfigError, match=r"2 ranks at ZeRO stage 3.*does not record.*resume with the same ranks"):
        build_at(world, blockwise_config(digits, tmp_path / "run"), 3)


def test_state_that_an_optimizer_does_not_declare_is_refused(world: World, digits: Path, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, world)
    message = "--optim.name adamw keeps the state {}, and its OptimizerFamily declares exp_avg, exp_avg_sq, step; name"
    with ExitStack() as stack:
        state = build(tiny(digits, tmp_path / "run"), launch(0), world, stack).state
        kept = state.engine.flats[0].state
        kept["extra"] = 0.5
        with pytest.raises(ConfigError, match=message.format("exp_avg, exp_avg_sq, extra, step")):
            checkpoints.draft(state)
        del kept["extra"], kept["exp_avg"]
        with pytest.raises(ConfigError, match=message.format("exp_avg_sq, step")):
            checkpoints.draft(state)


def build_at(world: World, config: RunConfig, stage: int) -> None:
    with ExitStack() as stack:
        build(config, launch(stage), world, stack)


@pytest.mark.fault(22)
@pytest.mark.parametrize(("key", "value"), [("lr", 1.0), ("betas", (0.5, 0.5)), ("eps", 1.0), ("weight_decay", 0.5)])
def test_a_parameter_group_that_is_not_the_configured_one_is_found(key: str, value: Any) -> None:
    """Also in the second group, which is where DeepSpeed's universal checkpoints lose it."""
    config = tiny(Path(), Path(), steps=64, optim__schedule="cosine", optim__warmup_steps=45)
    optimizer = build_optimizer([torch.zeros(3, requires_grad=True)], config.optim, skip_non_finite=False)
    optimizer.add_param_group({"params": [torch.zeros(4, requires_grad=True)]})
    for group in optimizer.param_groups:
        group["lr"] = config.optim.lr * (9 / 45)
    check_groups(optimizer, config.optim, config.steps, 9)
    del optimizer.param_groups[0]["eps"]  # a class may keep a hyper-parameter elsewhere
    check_groups(optimizer, config.optim, config.steps, 9)
    optimizer.param_groups[1][key] = value
    with pytest.raises(ConfigError, match=rf"parameter group 1 of --optim.name adamw has .*'{key}': .*after 9 steps"):
        check_groups(optimizer, config.optim, config.steps, 9)


@pytest.mark.fault(25)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", 1),
        ("data__shuffle_shards", 2),
        ("batch__samples", 32),
        ("optim__lr", 0.5),
        ("optim__name", "adamw8bit"),
        ("ema__rates", (0.9,)),
        ("performance__precision", "bf16"),
        ("performance__compile", True),
        ("objective__prediction", "x0"),
    ],
)
def test_a_field_that_changes_what_is_computed_may_not_change(field: str, value: Any) -> None:
    """``test_bad_input`` has the effect on a resume."""
    before, now = tiny(Path(), Path()), tiny(Path(), Path(), **{field: value})
    name = field.replace("__", ".")
    assert list(config_changes(as_json(before), as_json(now), ())) == [name]
    assert config_changes(as_json(before), as_json(now), (name,)) == {}
