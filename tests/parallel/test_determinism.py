"""Fixed orders of addition: set for a run and no longer, equal to the bit on a CPU, refusals that name the flag."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from fastdiff.parallel.determinism import deterministic, explain_nondeterminism, reserve_workspaces
from fastdiff.parallel.world import World
from fastdiff.train import main
from fastdiff.training.loop import train
from fastdiff.training.metrics import Meters
from tests.support.runs import assert_same_checkpoint, flags, hexes, launch, losses, tiny


def settings() -> tuple[object, ...]:
    cudnn, memory = torch.backends.cudnn, torch.utils.deterministic
    return (
        torch.get_deterministic_debug_mode(), cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory,
    )  # fmt: skip


def test_the_settings_hold_inside_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = settings()
    with suppress(ZeroDivisionError), deterministic(False):
        assert settings() == (*before[:2], True, before[3])  # cuDNN measures the convolutions
        raise ZeroDivisionError
    assert settings() == before
    with deterministic(False):
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    with suppress(ZeroDivisionError), deterministic(True):
        assert settings() == (2, True, False, False)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        raise ZeroDivisionError
    assert settings() == before


def test_a_given_workspace_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    reserve_workspaces(True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def unordered(*_: object) -> None:
    torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))


def test_an_operation_without_a_fixed_order_is_named() -> None:
    unordered()
    with deterministic(True), pytest.raises(RuntimeError) as raised:
        unordered()
    found = explain_nondeterminism(raised.value)
    assert str(found) == (
        "--performance.deterministic: put_ has no form that adds in a fixed order; leave the flag out"
    )
    # As torch says it of a workspace that varies.
    cublas = RuntimeError(
        "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or ..., but this "
        "operation is not deterministic because it uses CuBLAS and you have CUDA >= 10.2."
    )
    assert "a product by cuBLAS has no form" in str(explain_nondeterminism(cublas))
    assert "unset CUBLAS_WORKSPACE_CONFIG" in str(explain_nondeterminism(cublas))
    assert explain_nondeterminism(RuntimeError("CUDA out of memory")) is None
    assert explain_nondeterminism(ValueError("put_ does not have a deterministic implementation")) is None


@pytest.mark.parametrize("stage", [0, 3])
def test_on_a_cpu_the_flag_changes_no_bit(world: World, digits: Path, tmp_path: Path, stage: int) -> None:
    for name, wanted in (("free", False), ("fixed", True)):
        train(tiny(digits, tmp_path / name, performance__deterministic=wanted), launch(stage), world)
    assert hexes(losses(tmp_path / "free")) == hexes(losses(tmp_path / "fixed"))
    assert_same_checkpoint(tmp_path / "free", tmp_path / "fixed")
    assert torch.get_deterministic_debug_mode() == 0


def test_a_run_ends_with_one_message_that_names_the_flag(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Meters, "add", unordered)
    assert main([*flags(tiny(digits, tmp_path / "run")), "--performance.deterministic"]) == 2
    said = capfd.readouterr().err
    assert said.count("--performance.deterministic: put_ has no form that adds in a fixed order") == 1
    assert "Traceback" not in said
