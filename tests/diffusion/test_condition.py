"""Dropped conditions for guidance: the right share, at the same samples for all parts of a condition."""

import pytest
import torch
from torch import Tensor

from fastdiff.batch import Batch, Condition
from fastdiff.config.sections.objective import DdpmConfig
from fastdiff.diffusion.objective import Objective
from fastdiff.rng import Stream, uniform

CLASSES = 10
LABEL = {"label": torch.tensor(CLASSES)}
TEXT = {"context": torch.linspace(-1, 1, 15).view(5, 3), "pooled": torch.tensor([0.1, 0.2, 0.3, 0.4])}


def _batch(condition: Condition, size: int) -> Batch:
    return Batch(torch.zeros(size, 1, 1, 1), torch.arange(50, 50 + size), condition)


def _dropped(batch: Batch, null: Condition, share: float = 0.5, seed: int = 0) -> Condition:
    config = DdpmConfig(condition_dropout=share)
    return Objective(config, seed=seed, null=null, device="cpu").add_noise(batch).condition


def _text(size: int, dtype: torch.dtype = torch.bfloat16) -> Condition:
    generator = torch.Generator().manual_seed(1)
    return {
        "context": torch.randn(size, 5, 3, generator=generator).to(dtype),
        "pooled": torch.randn(size, 4, generator=generator).to(dtype),
        "time_ids": 1024 * torch.rand(size, 6, generator=generator),
    }


def _is(value: Tensor, null: Tensor) -> Tensor:
    """``[B]`` bool: which samples are the null one, in every element."""
    return (value == null.to(value.dtype)).flatten(1).all(dim=1)


def test_the_share_of_dropped_labels_and_its_independence_of_the_split() -> None:
    size = 20_000
    batch = _batch({"label": torch.arange(size) % CLASSES}, size)
    objective = Objective(DdpmConfig(condition_dropout=0.1), seed=0, null=LABEL, device="cpu")
    corruption = objective.add_noise(batch)
    label = corruption.condition["label"]
    dropped = label == CLASSES
    spread = 4 * (0.1 * 0.9 / size) ** 0.5
    assert abs(dropped.double().mean() - 0.1) < spread
    assert torch.equal(label[~dropped], batch.condition["label"][~dropped])
    # The drop knows nothing of the timestep.
    early = dropped[corruption.time < 500].double().mean()
    assert abs(early - 0.1) < spread * 2**0.5
    parts = [
        Batch(batch.latents[rows], batch.position[rows], {"label": batch.condition["label"][rows]})
        for rows in (slice(0, 7), slice(7, None))
    ]
    assert torch.equal(torch.cat([objective.add_noise(part).condition["label"] for part in parts]), label)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_parts_of_a_caption_are_dropped_together(dtype: torch.dtype) -> None:
    given = _text(400, dtype)
    batch = _batch(given, 400)
    found = _dropped(batch, TEXT)
    expected = uniform(0, Stream.LABEL_DROP, batch.position, 1)[:, 0] < 0.5
    assert 150 < expected.sum() < 250
    for name, null in TEXT.items():
        assert found[name].dtype == dtype
        assert torch.equal(_is(found[name], null), expected)
        assert torch.equal(found[name][~expected], given[name][~expected])
    assert torch.equal(found["time_ids"], given["time_ids"]), "the sizes are not part of the caption"


def test_a_batch_is_not_changed_by_the_drop() -> None:
    batch = _batch(_text(64), 64)
    before = {name: value.clone() for name, value in batch.condition.items()}
    _dropped(batch, TEXT)
    assert all(torch.equal(value, before[name]) for name, value in batch.condition.items())


def test_the_drop_at_its_ends_and_without_a_condition() -> None:
    given = _text(16)
    kept = _dropped(_batch(given, 16), TEXT, share=0.0)
    assert all(torch.equal(value, given[name]) for name, value in kept.items())
    gone = _dropped(_batch(given, 16), TEXT, share=1.0)
    assert all(_is(gone[name], null).all() for name, null in TEXT.items())
    labels = _batch({"label": torch.arange(16) % CLASSES}, 16)
    assert (_dropped(labels, LABEL, share=1.0)["label"] == CLASSES).all()
    assert _dropped(_batch({}, 16), LABEL) == {}


def test_another_seed_drops_others() -> None:
    batch = _batch({"label": torch.zeros(200, dtype=torch.int64)}, 200)
    first, second = (_dropped(batch, LABEL, seed=seed)["label"] for seed in (0, 1))
    assert 50 < (first != second).sum() < 150


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_columns_that_the_model_does_not_take_are_left_out(dropout: float) -> None:
    config = DdpmConfig(condition_dropout=dropout)
    objective = Objective(config, seed=0, null=LABEL, device="cpu", inputs=("label",))
    condition = {"label": torch.arange(4), "context": torch.zeros(4, 2, 3)}
    batch = Batch(latents=torch.zeros(4, 1, 2, 2), position=torch.arange(4), condition=condition)
    assert objective.add_noise(batch).condition.keys() == {"label"}


def test_each_data_set_may_have_a_share_of_its_own() -> None:
    """Its samples are those that a run with this share alone drops; the share of the run counts nowhere else."""
    size = 4000
    label, of_set = torch.arange(size) % CLASSES, torch.arange(size) % 3
    shares = (0.0, 0.25, 1.0)
    batch = Batch(torch.zeros(size, 1, 1, 1), torch.arange(size), {"label": label}, data_set=of_set)
    config = DdpmConfig(condition_dropout=0.0)
    objective = Objective(config, seed=0, null=LABEL, device="cpu", set_dropouts=shares)
    found = objective.add_noise(batch).condition["label"]
    for number, share in enumerate(shares):
        alone = Objective(DdpmConfig(condition_dropout=share), seed=0, null=LABEL, device="cpu")
        rows = of_set == number
        assert torch.equal(found[rows], alone.add_noise(batch).condition["label"][rows])
    assert 0.2 < (found[of_set == 1] == CLASSES).double().mean() < 0.3
