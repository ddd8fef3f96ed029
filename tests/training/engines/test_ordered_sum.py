"""Sums in the order of the micro-batches: the same bits on 1 to 4 ranks and at every stage, and what they send."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastdiff.config.command_line.config_file import with_optimizer
from fastdiff.config.deepspeed import resolve
from fastdiff.config.engine import choose
from fastdiff.config.launch_options import Launch
from fastdiff.config.run import RunConfig
from fastdiff.errors import ConfigError
from fastdiff.models.pretrained.pipeline import Pretrained
from fastdiff.models.pretrained.tiny_pipeline import build
from fastdiff.parallel.fragments import Fragment
from fastdiff.parallel.world import World
from fastdiff.planning.scaling.zero import Zero
from fastdiff.training.buffers import Gradients, places_of
from fastdiff.training.engines.ordered_sum import OrderedSum
from tests.end_to_end.test_transformer_families import CAPTIONS, config_of
from tests.support.forked import Ranks, forked_ranks, values
from tests.support.inputs import text_runs
from tests.support.inputs.encoding import captioned, encode
from tests.support.inputs.family_pipelines import TOKENS, family_pipeline
from tests.support.nights import by_day
from tests.support.runs import hexes, intact, launch, newest, tiny, train_losses
from tests.support.waiting import wait_until

STEPS = 6
ARMS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "adamw": ("adamw", {}, {}),
    "adamw-bf16": ("adamw", {}, {"precision": "bf16"}),
    "adamw8bit": ("adamw8bit", {}, {}),
    "muon8bit": ("muon8bit", {"iterations_dtype": "fp32"}, {}),
    "muon": ("muon", {"iterations_dtype": "fp32"}, {}),
    "muon-bf16": ("muon", {"iterations_dtype": "bf16"}, {"precision": "bf16"}),
}
"""Optimizer, its options, and those of the performance."""
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum", "exp_avg", "exp_avg_sq")}
"""Of optimizers whose state has an entry per element; of the others the weights after it show the state."""
LAYOUTS = [(1, 0), (1, 1), (2, 0), (2, 1), (2, 3), (3, 2), (4, 0), (4, 3)]
"""(ranks, ZeRO stage); the first is the flat engine on one rank."""
REST = [(1, 2), (1, 3), (2, 2), (3, 0), (3, 1), (3, 3), (4, 1), (4, 2)]


def run_of(
    digits: Path, folder: Path, arm: str, *, steps: int = STEPS, micro: int = 1, **performance: Any
) -> RunConfig:
    """A run of 12 samples per step, of which every step is clipped."""
    name, options, precision = ARMS[arm]
    config = with_optimizer(tiny(digits, folder), name, "this test")
    return replace(
        config,
        samples=12 * steps,
        batch=replace(config.batch, samples=12, micro=micro),
        optim=replace(config.optim, clip=0.05, weight_decay=0.01, **options),
        performance=replace(
            config.performance, **{"grad_accum_order": "micro_batches", **precision, **performance}
        ),
    )  # fmt: skip


def start(stage: int) -> Launch:
    """At this ZeRO stage, with gradients in several buckets."""
    given = launch(stage)
    zero = {**(given.deepspeed or {})["zero_optimization"], **({"reduce_bucket_size": 5000} if stage else {})}
    return replace(given, deepspeed={**(given.deepspeed or {}), "zero_optimization": zero})


def trained(world: World, configs: Mapping[str, RunConfig], stage: int = 0) -> dict[str, list[str]]:
    """Losses of every run."""
    return {name: hexes(train_losses(world, config, start(stage))) for name, config in configs.items()}


def state(folder: Path, arm: str) -> dict[str, Tensor]:
    """Weights, averages and moments of the newest checkpoint, whole."""
    saved = newest(folder)
    kinds, held = ("master", "ema/0.9", "ema/0.5", *MOMENTS.get(ARMS[arm][0], ())), {key for _, key in saved.keys("")}
    return {
        f"{kind}/{name}": saved.slice(kind, Fragment(name, 0, math.prod(shape), 0))
        for kind in kinds
        for name, shape in saved.manifest["parameters"].items()
        if f"{kind}/{name}" in held  # a parameter has the moments of Muon or of AdamW
    }


def assert_same_bits(folder: Path, expected: Path, arm: str) -> None:
    found, theirs = state(folder, arm), state(expected, arm)
    assert found.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(found[name], value), f"{folder.name} {name}"


@pytest.mark.parametrize("arms", by_day([("adamw", "muon")], (("adamw-bf16", "adamw8bit", "muon-bf16", "muon8bit"),)))
@pytest.mark.parametrize("layouts", by_day([LAYOUTS], ([LAYOUTS[0], *REST],)))
def test_runs_are_equal_to_the_bit_on_any_number_of_ranks_and_at_every_stage(
    digits: Path, tmp_path: Path, arms: Sequence[str], layouts: Sequence[tuple[int, int]]
) -> None:
    """Losses, weights, averages and moments; micro-batches of 2 do not divide 12 samples on 4 ranks."""
    found: dict[str, list[str]] = {}
    for ranks, stage in layouts:
        configs = {
            f"{arm}-{micro}": run_of(digits, tmp_path / f"{ranks}-{stage}-{arm}-{micro}", arm, micro=micro)
            for arm in arms
            for micro in (1, 2)
            if 12 % (micro * ranks) == 0 and (micro == 1 or stage in (0, 3))
        }
        for name, own in values(forked_ranks(trained, configs, stage, ranks=ranks))[0].items():
            assert own == found.setdefault(name, own), f"{ranks} ranks, stage {stage}, {name}"
            assert_same_bits(tmp_path / f"{ranks}-{stage}-{name}", tmp_path / f"1-0-{name}", name.rpartition("-")[0])


def unet_run(folder: Path, run: Path) -> RunConfig:
    if not (folder / "data").exists():
        text_runs.encode(folder / "data", build(folder / "pipeline"))
    return text_runs.text_run(folder / "data", folder / "pipeline", run, STEPS)


def sd3_run(folder: Path, run: Path) -> RunConfig:
    pipeline, data = folder / "sd3", folder / "data"
    if not data.exists():
        side = 8 * Pretrained(str(family_pipeline(pipeline, "sd3"))).latent_space.factor
        pictures = captioned(folder / "pictures", CAPTIONS, [(side, side)] * len(CAPTIONS))
        encode(pictures, data, pipeline / "pipeline", resolution=side, max_tokens=TOKENS["sd3"])
    return config_of(pipeline / "pipeline", data, run)


@pytest.mark.nightly
@pytest.mark.parametrize("run", [unet_run, sd3_run])
def test_other_networks_are_equal_at_every_stage(tmp_path: Path, run: Callable[[Path, Path], RunConfig]) -> None:
    """Their blocks read a condition several times, and skip connections have several readers."""
    found = {}
    for ranks, stage in ((1, 0), (2, 1), (2, 3)):
        config = run(tmp_path, folder := tmp_path / f"{ranks}-{stage}")
        performance = replace(config.performance, grad_accum_order="micro_batches")
        config = replace(config, performance=performance, batch=replace(config.batch, micro=1))
        found[ranks, stage] = values(forked_ranks(trained, {"": config}, stage, ranks=ranks))[0]
        assert found[ranks, stage] == found[1, 0]
        assert_same_bits(folder, tmp_path / "1-0", "adamw")


def test_without_them_the_bits_depend_on_the_ranks(digits: Path, tmp_path: Path) -> None:
    """Otherwise the test above would show nothing."""
    found = [
        values(
            forked_ranks(
                trained, {"": run_of(digits, tmp_path / str(ranks), "adamw", grad_accum_order="ranks")}, ranks=ranks
            )
        )[0]
        for ranks in (1, 3)
    ]
    assert found[0] != found[1]


def test_one_rank_adds_up_as_without_them(digits: Path, tmp_path: Path) -> None:
    """Without clipping, because the norm is taken in another order."""

    def unclipped(order: str) -> RunConfig:
        config = run_of(digits, tmp_path / order, "muon", grad_accum_order=order)
        return replace(config, optim=replace(config.optim, clip=0.0))

    found = values(forked_ranks(trained, {order: unclipped(order) for order in ("ranks", "micro_batches")}, ranks=1))[0]
    assert found["micro_batches"] == found["ranks"]


@pytest.mark.parametrize(
    ("arm", "stages"), by_day([("muon", (2, 3))], ("adamw", (0, 1)), ("adamw8bit", (3, 0)), ("muon8bit", (1, 2)))
)
def test_a_killed_run_goes_on_to_the_bit_on_other_ranks_and_at_another_stage(
    digits: Path, tmp_path: Path, arm: str, stages: tuple[int, int]
) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    long = run_of(digits, killed, arm, steps=1000)
    long = replace(long, output=replace(long.output, checkpoint_every=1))
    with Ranks(trained, {"": long}, stages[0], ranks=2):
        wait_until(lambda: bool(intact(killed)), "a checkpoint")
    steps = intact(killed)[0] + 3
    ends = {folder.name: run_of(digits, folder, arm, steps=steps) for folder in (killed, whole)}
    gone_on = values(forked_ranks(trained, {"": replace(long, samples=12 * steps)}, stages[1], ranks=3))[0]
    expected = values(forked_ranks(trained, {"": ends["whole"]}, ranks=1))[0]
    assert gone_on == expected
    assert_same_bits(killed, whole, arm)


def entry(number: int) -> float:
    """Entry of the gradient of a micro-batch; fp32 sums of these depend on their order."""
    return {5: 1e8, 7: -1e8}.get(number, 0.7)


def summed(world: World) -> tuple[Tensor, int, int]:
    """Sum of two micro-batches per rank, the bytes that this rank has sent, and the elements."""
    network = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))  # 58 elements in 4 places of 64: slices cut them
    places = places_of(network)
    sums = Gradients(places, torch.float32, world.device)
    ordered = OrderedSum(places, sums, torch.float32, world)
    for micro in range(12 // world.size):
        number = micro * world.size + world.rank
        for place in places:
            place.parameter.grad = torch.full_like(place.parameter, entry(number))
        ordered.collect()
        ordered.add()
        sums.has_some = True
    assert list(ordered.arrived()) == [sums.buffer.numel()]
    return torch.stack([view.flatten()[0] for view in sums.views]), ordered.sent_bytes, sums.buffer.numel()


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_every_rank_has_the_sum_in_order_and_sends_what_is_counted(ranks: int) -> None:
    expected = torch.zeros(())
    for number in range(12):
        expected = expected + entry(number)
    found = values(forked_ranks(summed, ranks=ranks))
    for sums, _, _ in found:
        assert torch.equal(sums, expected.expand(4))
    elements, micro_batches = found[0][2], 12 // ranks
    sizes = {message.kind: message.bytes for message in Zero(stage=0, in_order=True).messages([elements], 4, ranks, 4)}
    planned = micro_batches * sizes["all-to-all"] + sizes["all-gather"]
    assert sum(sent for _, sent, _ in found) == (ranks - 1) * planned


def test_what_cannot_add_up_so_is_refused(digits: Path, tmp_path: Path) -> None:
    config = run_of(digits, tmp_path, "adamw")

    def chosen(stage: int, *, engine: Any = "auto", optimizer: str = "adamw", zero: Mapping[str, Any] = {}) -> str:
        changed = with_optimizer(config, optimizer, "this test")
        given = start(stage).deepspeed or {}
        resolved = resolve({**given, "zero_optimization": {**given["zero_optimization"], **zero}}, changed, 2)
        return choose(changed.optim, replace(config.performance, engine=engine), resolved)

    assert [chosen(stage) for stage in range(4)] == ["flat", "deepspeed", "deepspeed", "deepspeed"]
    order = "--performance.grad_accum_order micro_batches"
    with pytest.raises(ConfigError, match=f"{order} at ZeRO stage 0 needs the flat .* deepspeed: leave it out"):
        chosen(0, engine="deepspeed")
    refused: Mapping[str, Any] = {"offload_optimizer": {"device": "cpu"}, "zero_quantized_gradients": True}
    for field, value in refused.items():
        with pytest.raises(ConfigError, match=f"{order} .* has zero_optimization.{field}: remove it, or use .* zero1"):
            chosen(2, zero={field: value})
        off: Any = False if value is True else {"device": "none"}
        assert chosen(2, zero={field: off}) == "deepspeed"
    with pytest.raises(ConfigError, match=f"{order} with --optim.name adamw8bit-bnb, .* use adamw, adamw8bit"):
        chosen(1, optimizer="adamw8bit-bnb")
    for micro in (None, "auto"):
        with pytest.raises(ConfigError, match=f"{order} needs .* given --batch.micro {micro}: set it to a number"):
            replace(config, batch=replace(config.batch, micro=micro))
    with pytest.raises(ConfigError, match=f"--performance.cuda_graph with {order}"):
        replace(config, performance=replace(config.performance, cuda_graph=True, device="cuda"))
