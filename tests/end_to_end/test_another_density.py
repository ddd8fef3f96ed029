"""A resumed run that changes the density of its timesteps."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastdiff.config.run import RunConfig
from fastdiff.config.sections.timesteps import TimestepConfig
from fastdiff.errors import ConfigError
from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from tests.support.runs import launch, newest, tiny


def config_of(data: Path, folder: Path, steps: int, density: str) -> RunConfig:
    config = tiny(data, folder, steps)
    return replace(
        config,
        objective=replace(config.objective, schedule="cosine", timesteps=5),
        timesteps=TimestepConfig(density=density),  # type: ignore[arg-type]
    )


def test_another_density_starts_anew(world: World, digits: Path, tmp_path: Path) -> None:
    def to(steps: int, density: str, allowed: tuple[str, ...] = ("timesteps.density",)) -> dict[str, torch.Tensor]:
        train(config_of(digits, tmp_path, steps, density), launch(allow_change=allowed), world)
        return newest(tmp_path).timesteps()

    assert to(2, "uniform") == {}
    with pytest.raises(ConfigError, match=r'--timesteps.density: "uniform" -> "importance"'):
        to(3, "importance", allowed=())
    assert to(3, "importance")["count"].sum() == 16
    assert to(4, "uniform") == {}
