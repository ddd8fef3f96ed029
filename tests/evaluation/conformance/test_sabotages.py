"""Sabotaged runs are accused with the true cause, and honest ones are not."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from fastdiff.cli.main import main
from fastdiff.config.presets import preset
from fastdiff.config.run import RunConfig
from fastdiff.evaluation.conformance.causes import likely
from fastdiff.evaluation.conformance.comparison import Conformance, compare
from fastdiff.evaluation.conformance.numbers import read_numbers
from fastdiff.evaluation.conformance.reference import read, shipped
from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from tests.support.inputs.captioned_digits import captioned_run, encode_captioned
from tests.support.runs import launch
from tests.support.sabotages import SABOTAGES, inject, run_until, without_masks

_LAST, _GUESSES = 500, 2
"""Step until which the cause must be found, among so many guesses."""


def found_in(run: Path) -> Conformance:
    expected = shipped("digits")
    assert expected is not None
    return compare(read_numbers(run, expected.windows), expected)


def digits_run(data: Path, folder: Path, seed: int) -> RunConfig:
    """The preset digits with a seed of its own, without files that the comparison does not need."""
    config = preset("digits")
    output = replace(config.output, folder=str(folder), checkpoint_every=0, sample_every=0)
    return replace(config, seed=seed, data=replace(config.data, path=str(data), loader="prefetch"), output=output)


@pytest.mark.nightly
def test_nine_of_ten_sabotages_are_found(digits: Path, tmp_path: Path, world: World) -> None:
    """The true cause is among the first two guesses after 500 steps; several sabotages of a cause count as one."""
    missed = set()
    for number, name in enumerate(SABOTAGES):
        with ExitStack() as stack:
            cause = inject(name, stack)
            run_until(digits_run(digits, tmp_path / name, 900 + number), world, _LAST)
        if cause not in [guess.name for guess in likely(found_in(tmp_path / name))[:_GUESSES]]:
            missed.add(cause)
    assert len(missed) <= 1, missed


@pytest.mark.nightly
def test_no_honest_seed_is_accused(digits: Path, tmp_path: Path, world: World) -> None:
    for seed in range(1, 21):
        run_until(digits_run(digits, tmp_path / str(seed), seed), world, _LAST)
        assert not found_in(tmp_path / str(seed)).deviations, f"seed {seed}"


def test_text_without_mask_is_found(digits: Path, tmp_path: Path, world: World) -> None:
    """The tenth cause needs captions: a text DiT on digits, whose captions have one to three of six tokens."""
    data = encode_captioned(digits, tmp_path / "data")
    for seed in range(4):
        train(captioned_run(data, tmp_path / str(seed), 60, seed=seed, output__log_every=2), launch(0), world)
    made = tmp_path / "reference.json"
    assert main(["reference", "make", *(str(tmp_path / name) for name in "012"), str(made)]) == 0
    with without_masks():
        train(captioned_run(data, tmp_path / "all", 60, seed=9, output__log_every=2), launch(0), world)
    expected = read(made)
    honest, seen = (compare(read_numbers(tmp_path / name, expected.windows), expected) for name in ("3", "all"))
    assert not honest.deviations
    assert likely(seen)[0].name == "text_mask"
