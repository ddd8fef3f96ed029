"""Data of the runs, and the device that they run on."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fastdiff.models.pretrained.tiny_pipeline import Kind, build
from fastdiff.parallel.world import World
from tests.gpu.cases import Inputs, write_weights
from tests.support.inputs.text_runs import encode


@pytest.fixture(scope="session")
def inputs(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("inputs")

    @cache
    def text(kind: Kind) -> tuple[Path, Path]:
        pipeline = build(folder / kind, kind=kind)
        return encode(folder / f"{kind}-data", pipeline), pipeline

    return Inputs(digits, text, write_weights(folder / "dit.safetensors"))


@pytest.fixture
def on(world: World, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The device that the test is for; on a machine with a GPU there are no runs on the CPU in this process."""
    from deepspeed.accelerator import get_accelerator

    wanted = request.param
    if wanted != world.device.type:
        pytest.skip(f"this process computes on {world.device.type}")
    if wanted == "cpu":  # torch computes in fp16 on every CPU, only slowly
        monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: True)
    return world.device
