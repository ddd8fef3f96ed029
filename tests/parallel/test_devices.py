"""The device of a process, and what a GPU can compute: by plain values, since no GPU need be there."""

import os
from typing import Any

import pytest
import torch

from fastdiff.checkpoint.unchanged import config_changes
from fastdiff.config.presets import PRESETS, preset
from fastdiff.config.run_record import as_json
from fastdiff.errors import ConfigError
from fastdiff.parallel import devices
from fastdiff.parallel.devices import (
    Capability,
    architecture_problem,
    precision_problem,
    require_gpu,
    select_device,
)
from fastdiff.parallel.world import World, start_world

CPU = torch.device("cpu")
CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
"""Architectures of torch 2.13 for CUDA 13."""


@pytest.mark.parametrize(
    ("precision", "capability", "refused"),
    [
        ("bf16", (7, 5), "this GPU (sm_75) has no bf16 arithmetic, which begins with sm_80"),
        ("bf16", (7, 0), "this GPU (sm_70)"),
        ("bf16", (8, 0), None),
        ("bf16", (12, 0), None),
        ("bf16", None, None),
        ("fp16", (7, 5), None),
        ("fp32", (7, 0), None),
    ],
)
def test_bf16_needs_ampere(precision: str, capability: Capability | None, refused: str | None) -> None:
    found = precision_problem(precision, capability)
    assert found is None if refused is None else refused in str(found)


@pytest.mark.parametrize(
    "capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1), (13, 0)]
)
def test_torch_has_code_for_every_gpu_that_people_have(capability: Capability) -> None:
    """sm_89 runs the code of sm_86, sm_103 that of sm_100, and what comes later the PTX."""
    assert architecture_problem(capability, CU130) is None


@pytest.mark.parametrize(
    ("capability", "built", "message"),
    [
        ((7, 0), CU130, r"has no code for sm_70, only for sm_75, .*; install a torch for an older CUDA version"),
        ((12, 0), ("sm_80", "sm_90"), r"has no code for sm_120, only for sm_80, sm_90; install a newer torch"),
        ((10, 3), ("sm_90a", "sm_100a"), "has no code for sm_103"),
        ((8, 0), ("sm_86",), "has no code for sm_80"),
        ((10, 0), (), None),
        ((9, 0), ("sm_90a",), None),
        ((10, 3), ("sm_100f",), None),
        ((12, 0), ("sm_80", "compute_90"), None),
        ((9, 0), ("nonsense", "sm_90"), None),
    ],
)
def test_torch_has_no_code_for(capability: Capability, built: tuple[str, ...], message: str | None) -> None:
    found = architecture_problem(capability, built)
    if message is None:
        assert found is None
    else:
        with pytest.raises(ConfigError, match=message):
            raise ConfigError(found or "")


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_gpu(2, 1, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ConfigError, match=r"has 2 GPUs \(CUDA_VISIBLE_DEVICES=0,1\), none for its rank 2 of 4"):
        require_gpu(2, 3, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match=r"has 1 GPU \(CUDA_VISIBLE_DEVICES=0\), none for its rank 1 of 2"):
        require_gpu(1, 1, 2)


@pytest.mark.parametrize(("local_rank", "local_size"), [(2, 1), (2, 3)])
def test_a_rank_beyond_the_gpus_is_a_message(local_rank: int, local_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "usable_gpus", lambda asked: 2)
    with pytest.raises(ConfigError, match=r"has 2 GPUs.*, none for its rank 2 of 3"):
        select_device("auto", local_rank, local_size)


def test_each_of_eight_ranks_that_sees_its_own_gpu_alone_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under Slurm's --gpus-per-task=1 it is number 0 of every rank."""
    monkeypatch.setattr(devices, "usable_gpus", lambda asked: 1)
    for name, value in (("set_device", None), ("get_device_capability", (9, 0)), ("get_arch_list", ["sm_90"])):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    assert select_device("auto", 0, 8) == torch.device("cuda", 0)


def test_the_architectures_of_rocm_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert architecture_problem((9, 4), ("gfx90a", "gfx942")) is not None
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    assert architecture_problem((9, 4), ("gfx90a", "gfx942")) is None


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert select_device() == select_device("cpu", 5, 8) == CPU
    with pytest.raises(ConfigError, match=r"--performance.device cuda: .*hides all.* add --performance.device cpu"):
        select_device("cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(ConfigError, match=r"there is none here; start it on a machine with a GPU"):
        select_device("cuda")
    monkeypatch.setattr(devices, "unusable_gpu", lambda **_: "there is one, and it is out of order")
    with pytest.raises(ConfigError, match=r"^there is one, and it is out of order$"):
        select_device()
    assert select_device("cpu") == CPU


def test_the_presets_of_small_networks_run_everywhere() -> None:
    found = {name: preset(name).performance.device for name in PRESETS}
    small = {name for name in PRESETS if name.startswith("digits")} | {"dit-small-images"}
    assert {name for name, device in found.items() if device == "auto"} == small
    assert set(found.values()) == {"auto", "cuda"}


@pytest.mark.parametrize("before", [{}, {"device": "cpu"}, {"device": "cuda"}])
def test_a_run_continues_on_another_device(before: dict[str, Any]) -> None:
    """Also one of a version that had no such field."""
    saved = as_json(preset("digits"))
    del saved["performance"]["device"]
    saved["performance"] |= before
    assert config_changes(saved, as_json(preset("digits")), ()) == {}


def test_the_cores_are_shared_among_the_ranks_also_beside_gpus(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer that is offloaded steps on them."""
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_SIZE", "2")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr("fastdiff.parallel.world.select_device", lambda *given: torch.device("cuda", 0))
    try:
        assert start_world().device.type == "cuda"
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
