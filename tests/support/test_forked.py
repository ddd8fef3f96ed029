"""The fork server of tests/support/forked.py starts real ranks of the trainer."""

import os

import pytest
import torch

from fastdiff.parallel.world import World
from tests.support.forked import WITHOUT_GPU, forked_ranks, values
from tests.support.processes import run


def _what_it_sees(world: World) -> tuple[str, bool, str | None, str | None]:
    seen = (os.environ.get(name) for name in WITHOUT_GPU)
    return world.device.type, torch.cuda.is_available(), *seen


def test_no_process_of_a_test_sees_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where this process does: two ranks would need two."""
    for name, value in (("CUDA_VISIBLE_DEVICES", "0"), ("TRITON_INTERPRET", "0")):
        monkeypatch.setenv(name, value)
    assert values(forked_ranks(_what_it_sees)) == [("cpu", False, "", "1")] * 2
    command = ["sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES,$TRITON_INTERPRET"']
    assert run(command).output == ",1\n"
    assert run(command, CUDA_VISIBLE_DEVICES="0").output == "0,1\n", "unless it is asked for"
