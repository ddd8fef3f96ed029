"""``bench fp8``: real runs in both arithmetics, and a test of losses that finds a difference where there is one."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from fastdiff.config.run_record import read_record
from fastdiff.data.encoding.builtin import encode_digits
from fastdiff.evaluation.validation_files import Validated
from fastdiff.models import delayed_scales, fp8
from fastdiff.models.build import build_model
from fastdiff.parallel.world import World
from fastdiff_bench.__main__ import main
from fastdiff_bench.commands.fp8 import comparisons
from fastdiff_bench.measure.paired_runs import of_other_code
from fastdiff_bench.records import record
from fastdiff_bench.records.paired import difference, holm
from fastdiff_bench.trainers import in_fp8
from fastdiff_bench.trainers.in_fp8 import BASELINE, Trained, Trial
from fastdiff_bench.trainers.rounded import ROUNDINGS, convert, rounded

PARTS = ("outputs", "input gradients", "weight gradients")
CONTROL = "fp8, margin 0.5"
AT_ONE_END = "fp8, dW in bf16"
"""Differs from the others at a few noise levels, in a test."""
TINY = Trial(width=64, depth=1, steps=18, batch=16, seed=0, arithmetic=BASELINE)


def test_a_mean_difference_is_tested_by_students_t() -> None:
    values = [0.3, -0.1, 0.4, 0.2]
    found = difference(values)
    assert found.p == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    assert (found.mean, found.error) == pytest.approx((0.2, stats.sem(values)))
    assert difference([0.0, 0.0]).p == 1.0
    assert difference([0.1, 0.1]).p == 0.0


def test_probabilities_are_corrected_for_their_number() -> None:
    assert holm([0.01, 0.04, 0.03, 0.9]) == pytest.approx([0.04, 0.09, 0.09, 0.9])
    assert holm([0.6, 0.5]) == [1.0, 1.0]


def trained(seed: int, arithmetic: str, change: float, at: float | None = None) -> Trained:
    """A run that differs from the baseline by a share of the loss, at a log SNR and more, and by chance."""
    drawn = np.random.default_rng([seed, len(arithmetic)])
    levels = np.linspace(-10, 10, 320).astype(np.float32)
    losses = (1 + 0.1 * seed) * np.exp(-levels.astype(np.float64) / 9)
    losses *= 1 + 1e-3 * drawn.standard_normal() + change * (levels >= (-np.inf if at is None else at))
    about = {"data": "digits", "seed": 1, "objective": {}, "unit": "mse"}
    validated = Validated(np.arange(320), levels, losses, losses, about)
    return Trained(Trial(64, 1, 18, 16, seed, arithmetic), validated, {}, None)


def test_the_test_finds_what_differs_and_no_more() -> None:
    changes = {BASELINE: (0.0, None), "fp8": (0.0, None), CONTROL: (0.1, None), AT_ONE_END: (0.1, 7.5)}
    runs = [trained(seed, name, change, at) for seed in range(3) for name, (change, at) in changes.items()]
    found = {(name, other): one for (_, name, other), one in comparisons(runs, Path()).items()}
    assert found["fp8", BASELINE].faults == []
    assert not found["fp8", BASELINE].differs
    assert found[CONTROL, BASELINE].differs
    assert found[CONTROL, BASELINE].total.mean == pytest.approx(10, abs=0.5)
    one_end = found[AT_ONE_END, BASELINE]
    assert one_end.differs
    assert [name for name, (_, p) in one_end.levels.items() if p < 0.05] == ["7.50 to 8.75", "above 8.75"]
    assert found["fp8", AT_ONE_END].total.mean == pytest.approx(-one_end.total.mean, abs=0.2)


def test_runs_of_other_code_are_counted() -> None:
    assert list(of_other_code(["a1", None], "a1")) == []
    (line,) = of_other_code(["a1", "b2", "a1", None], "b2")
    assert line.startswith("2 of 4 runs are of other code, a1;")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    for split in ("train", "test"):
        encode_digits(folder / split, split=split)
    return folder


def test_a_run_leaves_losses_and_errors_of_gradients(world: World, root: Path) -> None:
    before = fp8.LEAST, delayed_scales.MARGIN
    assert in_fp8.finished(TINY, root) is None
    in_fp8.run(TINY, root)
    found = in_fp8.finished(TINY, root)
    assert found is not None
    assert len(found.validated.loss) == 382
    assert found.commit == read_record(TINY.folder(root))["git"]
    assert not (TINY.folder(root) / "checkpoints").exists()
    assert before == (fp8.LEAST, delayed_scales.MARGIN)
    for errors in found.gradient_errors.values():
        assert errors[BASELINE] < errors["fp8"] < errors[CONTROL]
        assert errors["rounded"] == pytest.approx(errors["fp8"], rel=0.1)  # the same by other code


def test_values_share_scales_as_asked() -> None:
    matrix = torch.tensor([[1.0, 1.0 + 1 / 8, 0.0, 0.0], [2.0**-20, 300.0, 2.0**-20, 2.0**-8]])
    assert rounded(matrix, math.inf)[1].tolist() == [0, 288, 0, 2.0**-8]  # 3 bits; the least number times a scale of 2
    assert rounded(matrix, 0)[0].tolist() == [1, 1.125, 0, 0]
    assert rounded(matrix, 2)[1].tolist() == [0, 288, 2.0**-20, 2.0**-8]


@pytest.mark.parametrize("part", PARTS)
def test_the_operands_of_one_product_are_rounded(part: str) -> None:
    network = build_model(TINY.network)
    layer = network.get_submodule("blocks.0.mlp.fc1")
    assert isinstance(layer, nn.Linear)
    convert(network, ROUNDINGS[f"rounded, {part} only"])
    inputs = torch.linspace(-1, 1, 3 * 64).view(3, 64).requires_grad_()
    gradient = torch.linspace(-2, 3, 3 * 256).view(3, 256)
    output = layer(inputs)
    output.backward(gradient)
    products = {
        "outputs": (output - layer.bias, inputs, layer.weight),
        "input gradients": (inputs.grad, gradient, layer.weight.t()),
        "weight gradients": (layer.weight.grad, gradient.t(), inputs.t()),
    }
    for name, (found, a, b) in products.items():
        factors = [rounded(factor, math.inf) for factor in (a, b)] if name == part else [a, b]
        torch.testing.assert_close(found, factors[0] @ factors[1].t(), rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
def test_the_record_has_both_arithmetics(tmp_path: Path) -> None:
    assert main(["fp8", "--smoke", "--only", "fp8", "--folder", str(tmp_path / "runs"), "--out", str(tmp_path)]) == 0
    rows = record.read(tmp_path / "fp8.jsonl").measurements
    losses = {row.provider for row in rows if row.quantity == "validation loss, seed 1"}
    assert losses == {BASELINE, "fp8"}
    assert [row.provider for row in rows if row.quantity == f"difference from {BASELINE}"] == ["fp8"]
