"""``statistics.jsonl``: what a run was fed and became, at few steps, whatever the ranks and the stage."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fastdiff.checkpoint.reader import Checkpoint
from fastdiff.data.loading.build import build_order
from fastdiff.data.shards.reader import LatentReader
from fastdiff.parallel.world import World
from fastdiff.rng import Stream, uniform
from fastdiff.training.callbacks.statistics import is_recorded
from fastdiff.training.loop import train
from fastdiff.training.statistics import samples
from fastdiff.training.statistics.weights import group_of
from tests.support.inputs.captioned_digits import captioned_run, encode_captioned
from tests.support.processes import run_ranks
from tests.support.runs import launch, newest, tiny

_OF_WEIGHTS = ("weights/", "averages/")


def recorded(folder: Path) -> dict[int, dict[str, list[float | None]]]:
    lines = [json.loads(line) for line in (folder / "statistics.jsonl").read_text().splitlines()]
    return {line["step"]: line["values"] for line in lines}


def test_the_steps_are_few() -> None:
    assert [n for n in range(1, 1001) if is_recorded(n)] == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]


def test_it_tells_what_the_steps_saw(digits: Path, tmp_path: Path, world: World) -> None:
    """Latents and dropped classes of the very samples, and the weights and averages of the checkpoint."""
    changes = {"output__checkpoint_every": 6, "objective__condition_dropout": 0.3, "batch__samples": 64}
    config = tiny(digits, tmp_path / "run", 24, **changes)  # 6 steps of 64 samples
    train(config, launch(), world)
    found = recorded(tmp_path / "run")
    assert list(found) == [1, 2, 5, 6]
    with LatentReader(digits) as reader:
        order = build_order(reader.info, seed=0, window_shards=config.data.shuffle_shards, global_batch=64)
        positions = np.arange(128, 320)  # of the steps 3 to 5, which the record after step 5 has
        latents = reader.read(order.samples(positions))["latent"].astype(np.float64)
    values = found[5]
    assert values["latents/mean"][0] == pytest.approx(latents.mean(), rel=1e-5)
    assert values["latents/std"][0] == pytest.approx(latents.std(), rel=1e-5)
    standard = (latents - latents.mean()) / latents.std()
    assert values["latents/skewness"][0] == pytest.approx((standard**3).mean(), rel=1e-4)
    assert values["latents/kurtosis"][0] == pytest.approx((standard**4).mean(), rel=1e-4)
    dropped = uniform(0, Stream.LABEL_DROP, torch.from_numpy(positions), 1)[:, 0] < 0.3
    assert values["condition/label/null"][0] == pytest.approx(float(dropped.double().mean()), rel=1e-5)
    assert 0 < values["condition/label/null"][1] < 0.15  # type: ignore[operator]
    # v = alpha * noise - sigma * x0: with little noise it is the noise, with much the latents.
    squares = {name: value[0] for name, value in values.items() if name.startswith("target/size")}
    assert squares["target/size_snr_00"] == pytest.approx((latents**2).mean(), rel=0.1)
    saved = newest(tmp_path / "run")
    assert_sizes(saved, found[6])


def assert_sizes(saved: Checkpoint, values: dict[str, list[float | None]]) -> None:
    """Root mean squares by group, and norms of the averages, from the whole tensors of a checkpoint."""
    groups: dict[str, list[torch.Tensor]] = {}
    squares, apart = 0.0, 0.0
    masters, averages = saved.weights(), saved.weights(0.9)
    for name in masters:
        weights, average = masters[name].double(), averages[name].double()
        groups.setdefault(group_of(name), []).append(weights.flatten())
        squares += float(weights.square().sum())
        apart += float((average - weights).square().sum())
    for group, parts in groups.items():
        assert values[f"weights/{group}"][0] == pytest.approx(float(torch.cat(parts).square().mean().sqrt()), rel=1e-5)
    assert values["averages/0.9/share"] == [1.0, None]
    assert values["averages/0.9/distance"][0] == pytest.approx((apart / squares) ** 0.5, rel=1e-4)


def statistics_of_ranks(world: World, digits: Path, folder: Path) -> None:
    train(tiny(digits, folder / f"{world.size}", 5, objective__condition_dropout=0.3), launch(), world)


def test_any_number_of_ranks_records_the_same(digits: Path, tmp_path: Path) -> None:
    """Equal numbers of the samples, to the last digit, and equal weights and averages up to their own rounding."""
    for ranks in (1, 2):
        run_ranks(statistics_of_ranks, digits, tmp_path, ranks=ranks)
    one, two = (recorded(tmp_path / ranks) for ranks in "12")
    assert one.keys() == two.keys() == {1, 2, 5}
    for step, values in one.items():
        assert values.keys() == two[step].keys()
        for name, pair in values.items():
            if name.startswith(_OF_WEIGHTS):
                assert two[step][name][0] == pytest.approx(pair[0], rel=1e-3), name
            else:
                assert two[step][name] == pair, name


def test_samples_are_measured_a_few_at_a_time(
    digits: Path, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, elements in (("whole", 2**20), ("parts", 5 * 64)):
        monkeypatch.setattr(samples, "_ELEMENTS", elements)
        train(tiny(digits, tmp_path / name, 2, timesteps__stratified=True), launch(0), world)
    assert recorded(tmp_path / "whole") == recorded(tmp_path / "parts")


def test_a_run_on_captions_tells_of_its_masks(digits: Path, tmp_path: Path, world: World) -> None:
    """The dropped captions, and the share of tokens that the network may attend to."""
    data = encode_captioned(digits, tmp_path / "data")
    train(captioned_run(data, tmp_path / "run", 5, objective__condition_dropout=0.2), launch(), world)
    values = recorded(tmp_path / "run")[5]
    null, share = values["condition/context/null"][0], values["condition/context_mask/share"][0]
    assert 0 < null < 0.5  # type: ignore[operator]
    # Captions of three, two and one word, and one token for a dropped one, of six.
    assert share == pytest.approx(((1 - null) * 2 + null) / 6, abs=0.05)  # type: ignore[operator]
