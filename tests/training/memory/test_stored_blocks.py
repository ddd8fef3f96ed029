"""``--performance.stored_blocks``: blocks that keep their activations although the others are recomputed."""

from pathlib import Path

import pytest

from fastdiff.config.command_line import train_flags
from fastdiff.errors import ConfigError
from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from tests.support.runs import hexes, launch, losses, tiny


def test_a_run_resumes_with_another_number_to_the_bit(world: World, digits: Path, tmp_path: Path) -> None:
    whole = tiny(digits, tmp_path / "whole", 6)
    train(whole, launch(1), world)
    for steps, stored in ((2, 1), (4, 0), (6, 2)):
        part = tiny(digits, tmp_path / "run", steps, performance__recompute=True, performance__stored_blocks=stored)
        train(part, launch(1), world)
    found = hexes(losses(tmp_path / "run"))
    assert found == hexes(losses(tmp_path / "whole"))
    assert len(found) == 6


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--performance.stored_blocks", "3"), "3 changes nothing without recomputation: add --performance.recompute"),
        (("--performance.recompute", "--performance.stored_blocks", "-1"), "-1: expected 0 or more blocks"),
    ],
)
def test_a_number_without_effect_is_refused(flags: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"--performance.stored_blocks {reason}"):
        train_flags.parse(["--preset", "digits", *flags])


def test_more_than_the_network_has_are_refused(world: World, digits: Path, tmp_path: Path) -> None:
    config = tiny(digits, tmp_path, performance__recompute=True, performance__stored_blocks=99)
    with pytest.raises(ConfigError, match=r"--performance.stored_blocks 99: DiT has 2 blocks here; give at most"):
        train(config, launch(1), world)
