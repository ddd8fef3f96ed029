"""A GPU that torch cannot use: each cause with its remedy, on a pretended machine and through the commands."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fastdiff.errors import ConfigError
from fastdiff.parallel.devices import usable_gpus
from fastdiff.parallel.unusable_gpu import Traces, cause, traces, unusable_gpu
from tests.support.injected.pretended_gpu import PretendedGpu
from tests.support.inputs.images import encode, natural
from tests.support.processes import ON_CPU, Finished, deepspeed_command
from tests.support.runs import flags, losses, tiny
from tests.support.scripts import COMMAND, TRAIN, run_script

OLD = "The NVIDIA driver on your system is too old (found version 12080). Please update your GPU driver"
CAUSES: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "torch without CUDA": (
        {"cuda": None},
        {},
        r"is built without CUDA; install for CUDA 13: `CUDA=13 make` in a clone, or `pip install 'torch>=2.11,<2.16' "
        r"'nvidia-dali-cuda130>=",
    ),
    "old driver": (
        {"driver": "570.124.06", "failure": OLD},
        {},
        r"its driver 570\.124\.06 is older than CUDA 13\.0 of this torch, which needs 580\.65 or newer; update the "
        r"driver, or install for CUDA 12: `CUDA=12 make` in a clone, or `pip install 'torch>=2.10,<2.11' "
        r"'nvidia-dali-cuda120>=2.4,<3' 'xformers>=[^`]+`;",
    ),
    "old driver in a job with one GPU of eight": (
        {"gpus": 8, "granted": 1, "driver": "570.124.06", "failure": OLD},
        {"CUDA_VISIBLE_DEVICES": "0"},
        r"its driver 570\.124\.06 is older than CUDA 13\.0 of this torch",
    ),
    "a number beyond the one GPU of a job": (
        {"gpus": 8, "granted": 1},
        {"CUDA_VISIBLE_DEVICES": "1"},
        r"CUDA_VISIBLE_DEVICES=1 names a device that does not exist; there is one GPU, number 0: correct it",
    ),
    "no permission": (
        {"closed": True},
        {},
        r"this user may not open /dev/nvidia0, /dev/nvidia1, /dev/nvidiactl, /dev/nvidia-uvm; join the group",
    ),
    "no device nodes": (
        {"gpus": 0},
        {},
        r"driver 580\.95\.05 is loaded, and there is no device node /dev/nvidia0; start a container with --gpus all",
    ),
    "no such device": (
        {},
        {"CUDA_VISIBLE_DEVICES": "2,0"},
        r"CUDA_VISIBLE_DEVICES=2,0 names a device that does not exist; there are 2 GPUs, numbers 0 to 1: correct it",
    ),
    "another error": (
        {"failure": "Error 802: system not yet initialized"},
        {},
        r"Error 802: system not yet initialized; with NVSwitch .* systemctl enable --now nvidia-fabricmanager;",
    ),
}
"""The machine, the environment, and what the message must say."""
BY_NIGHT = {"old driver in a job with one GPU of eight": pytest.mark.nightly}
"""By day ``test_the_cause`` tells it from the permissions."""


def train(gpu: PretendedGpu, digits: Path, **environment: str) -> Finished:
    own = flags(tiny(digits, gpu.folder / "run", steps=1))
    return gpu.run(sys.executable, "fastdiff/train.py", *own, **environment)


def train_quickly(gpu: PretendedGpu, digits: Path, **environment: str) -> Finished:
    return gpu.run_script(TRAIN, *flags(tiny(digits, gpu.folder / "run", steps=1)), **environment)


def one_message(done: Finished) -> str:
    """Return the only line of a command that refused to start."""
    assert done.code == 2, done.output
    (line,) = [line for line in done.output.splitlines() if line.strip()]
    assert line.startswith("fastdiff: error: this machine has an NVIDIA GPU that torch cannot use: "), line
    assert line.endswith(
        "train with --performance.device cpu; for any other command set CUDA_VISIBLE_DEVICES= (empty)"
    ), line
    return line


@pytest.mark.parametrize("name", [pytest.param(name, marks=BY_NIGHT.get(name, ())) for name in CAUSES])
def test_a_run_is_refused_with_the_cause_and_the_remedy(name: str, digits: Path, tmp_path: Path) -> None:
    """Where not all device nodes open, a command of its own sees them at their places."""
    machine, environment, message = CAUSES[name]
    gpu = PretendedGpu(tmp_path, **machine).make()
    run_train = train if {"closed", "granted"} & machine.keys() else train_quickly
    assert re.search(message, one_message(run_train(gpu, digits, **environment)))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("no such device", ["sample", "no-run"]),
        ("old driver", ["encode", "images", "out", "--autoencoder", "identity", "--resolution", "8"]),
    ],
)
def test_the_other_commands_refuse_too(name: str, command: list[str], digits: Path, tmp_path: Path) -> None:
    machine, environment, message = CAUSES[name]
    gpu = PretendedGpu(tmp_path / "gpu", **machine).make()
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "0.png").write_bytes(encode(natural(8, 8, seed=0), "PNG"))
    places = [str(tmp_path / word) if word in ("images", "out", "no-run") else word for word in command]
    assert re.search(message, one_message(gpu.run_script(COMMAND, *places, **environment)))


def test_the_doctor_names_it_as_a_problem_and_goes_on(tmp_path: Path) -> None:
    gpu = PretendedGpu(tmp_path, cuda=None).make()
    done = gpu.run_script(COMMAND, "doctor", "--preset", "dit-s-8-256")
    assert done.code == 0, done.output
    assert "PROBLEM: this machine has an NVIDIA GPU that torch cannot use: this torch" in done.output
    assert "preset dit-s-8-256 on cpu, bf16, blocks eager:" in done.output
    assert "OK device" not in done.output
    assert "OK libraries" in done.output


@pytest.mark.nightly
def test_the_cpu_on_purpose(digits: Path, tmp_path: Path) -> None:
    """By the flag, or by hiding the GPUs; the run is on the CPU and continues there.

    DeepSpeed shows its ranks a hidden GPU. So these tests, and users who want the CPU on purpose, say so by the flag.
    """
    gpu = PretendedGpu(tmp_path, **CAUSES["old driver"][0]).make()
    by_flag = deepspeed_command(*flags(tiny(digits, tmp_path / "run", steps=1)))
    assert tuple(by_flag[-2:]) == ON_CPU
    shown = gpu.run_with_forks(*by_flag[:-2], CUDA_VISIBLE_DEVICES="")
    assert shown.code == 2, shown.output
    assert "this machine has an NVIDIA GPU that torch cannot use" in shown.output
    asked = gpu.run_with_forks(*by_flag)
    assert asked.code == 0, asked.output
    assert "on cpu: 1 rank x 16 samples x 1 micro-batch" in asked.output
    own = [*flags(tiny(digits, tmp_path / "run", steps=2)), "--performance.device", "auto"]
    hidden = gpu.run_script(TRAIN, *own, CUDA_VISIBLE_DEVICES="")
    assert hidden.code == 0, hidden.output
    assert "resuming from step 1" in hidden.output, "another device is no other run"
    assert len(losses(tmp_path / "run")) == 2


def test_a_preset_made_for_gpus_asks_for_the_cpu_by_name(digits: Path) -> None:
    fits = [
        "--data.path",
        digits,
        "--model.channels",
        "1",
        "--model.size",
        "8",
        "--model.classes",
        "10",
        "--data.no-random-flip",
    ]
    done = run_script(TRAIN, "--preset", "dit-s-8-256", *fits, CUDA_VISIBLE_DEVICES="")
    assert done.code == 2
    assert "there is none here (CUDA_VISIBLE_DEVICES hides all)" in done.output
    assert "add --performance.device cpu to run it on the CPU" in done.output


@pytest.mark.parametrize("visible", ["", " ", "-1", "-1,0"])
def test_gpus_that_are_hidden_on_purpose_are_none(
    visible: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastdiff.parallel.unusable_gpu._ROOT", PretendedGpu(tmp_path).make().folder)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert unusable_gpu() is not None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert unusable_gpu() is None


def test_a_machine_without_a_gpu_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastdiff.parallel.unusable_gpu._ROOT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert unusable_gpu() is None


@pytest.mark.parametrize(
    ("machine", "found"),
    [
        ({"gpus": 2, "driver": "570.124.06"}, (2, "570.124.06", True, True)),
        ({"gpus": 0, "driver": "", "smi": True}, (0, "", True, True)),
        ({"gpus": 0, "driver": "570.124.06", "pci": False}, (0, "570.124.06", True, False)),
        ({"gpus": 1, "driver": "", "smi": False, "pci": False}, (1, "", False, False)),
    ],
)
def test_traces_that_prove_a_gpu(
    machine: dict[str, Any], found: tuple[int, str, bool, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = PretendedGpu(tmp_path, **machine).make()
    look_at(gpu, monkeypatch)
    got = traces(gpu.folder)
    assert (len(got.nodes), got.driver, bool(got.smi), got.pci) == found
    assert got.has_uvm is bool(machine["gpus"])
    assert unusable_gpu() is not None


def look_at(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastdiff.parallel.unusable_gpu._ROOT", gpu.folder)
    monkeypatch.setenv("PATH", str(gpu.folder / "bin"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize("kind", ["0x030000", "0x020000"])
def test_nvidia_smi_without_a_gpu_is_none(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A login node, a card that was removed, or a network card of Mellanox's owner; also if a GPU is asked for."""
    gpu = PretendedGpu(tmp_path, gpus=0, driver="").make()
    (device,) = (tmp_path / "sys/bus/pci/devices").iterdir()
    (device / "class").write_text(f"{kind}\n")
    look_at(gpu, monkeypatch)
    assert (unusable_gpu() is None) is (kind == "0x020000")
    (device / "vendor").write_text("0x8086\n")
    assert unusable_gpu() is unusable_gpu(required=True) is None


def test_a_container_without_the_gpus_of_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees the host's driver and PCI bus. A run that asks for a GPU is told how to start the container."""
    look_at(PretendedGpu(tmp_path, gpus=0, smi=False).make(), monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert usable_gpus("auto") == 0
    with pytest.raises(ConfigError, match=r"driver 580\.95\.05 is loaded, .*; start a container with --gpus all"):
        usable_gpus("cuda")


def test_windows_shows_its_gpu_as_dxg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = PretendedGpu(tmp_path, gpus=0, driver="", pci=False).make()
    look_at(gpu, monkeypatch)
    assert unusable_gpu() is None
    (tmp_path / "dev/dxg").touch()
    assert unusable_gpu() is not None
    assert traces(tmp_path).has_uvm, "there it is not needed"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024", "535.183.01"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (dvs)", "570.124.06"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.65  Release Build", "580.65"),
        ("nothing known", ""),
    ],
)
def test_the_version_of_the_driver(text: str, version: str, tmp_path: Path) -> None:
    path = tmp_path / "proc/driver/nvidia/version"
    path.parent.mkdir(parents=True)
    path.write_text(f"{text}\nGCC version:  gcc version 12.3.0\n")
    assert traces(tmp_path).driver == version


GPU = Traces(nodes=(Path("/dev/nvidia0"),), driver="580.95.05", uuids=("GPU-12345678-aaaa",))


@pytest.mark.parametrize(
    ("found", "cuda", "visible", "failure", "message"),
    [
        (
            Traces(smi="/usr/bin/nvidia-smi", pci=True),
            "13.0",
            None,
            "",
            "it is on the PCI bus, and no driver is loaded",
        ),
        (Traces(GPU.nodes), None, None, "", "; install for CUDA 13: "),
        (Traces(GPU.nodes, driver="535.183.01"), None, None, "", "; install for CUDA 12: "),
        (Traces(GPU.nodes, driver="450.80.02"), None, None, "", "too old as well: update it to 580.65 or newer, then "),
        (Traces(GPU.nodes, closed=("/dev/nvidia0",), driver="535.183.01"), "13.0", None, "", "is older than CUDA 13.0"),
        (Traces(GPU.nodes), "13.0", None, OLD, "or install for CUDA 12: `CUDA=12 make`"),
        (Traces(GPU.nodes, driver="580.95.05"), "14.0", None, OLD.replace("12080", "13000"), "for CUDA 13: `CUDA=13 "),
        (
            Traces(GPU.nodes, has_uvm=False),
            "13.0",
            None,
            "unknown error",
            "no device node /dev/nvidia-uvm: run `nvidia-mo",
        ),
        (GPU, "13.0", "GPU-87654321", "", "CUDA_VISIBLE_DEVICES=GPU-87654321 names a device that does not exist"),
        (GPU, "13.0", "GPU-12345678", "Error 999: unknown", "Error 999: unknown; "),
        (GPU, "13.0", "0", "", "torch finds none; `nvidia-smi -L` must list it, and an instance of it if MIG is on: "),
        (GPU, "13.0", "1", "", "there is one GPU, number 0: correct it"),
        (GPU, "13.0", "NoDevFiles", "", r"Slurm has given this job none: request one with --gpus-per-node"),
    ],
)
def test_the_cause(found: Traces, cuda: str | None, visible: str | None, failure: str, message: str) -> None:
    assert message in cause(found, cuda, visible, failure)


@pytest.mark.parametrize("driver", ["390.12", "450.80.02", "510.47.03"])
def test_below_the_oldest_cuda_only_another_driver_helps(driver: str) -> None:
    found = cause(Traces(GPU.nodes, driver=driver), "12.8", None, OLD.replace("12080", "11040"))
    assert found.endswith("needs 525.60 or newer; update the driver")
