"""Whether DALI works here: by trying it, and by the CUDA version of its package."""

import subprocess
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
import torch

from fastdiff.config.run import RunConfig
from fastdiff.config.sections.data import DataConfig
from fastdiff.data import dali_trial
from fastdiff.data.dali_trial import dali_installed, dali_problem, install_dali, version_problem
from fastdiff.data.images import decode
from fastdiff.data.images.decode import ImageTransform, open_decoder
from fastdiff.data.loading import build
from fastdiff.data.loading.build import choose_loader
from fastdiff.errors import ConfigError
from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from tests.support.processes import ROOT, run_ranks
from tests.support.runs import launch, tiny

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("installed", "cuda", "message"),
    [
        ([13], 13, None),
        ([12], 12, None),
        ([], 12, None),
        ([13], 12, r"^nvidia-dali-cuda130 is for CUDA 13, and torch for CUDA 12; .*pip install 'nvidia-dali-cuda120>="),
        ([12], 13, r"^nvidia-dali-cuda120 is for CUDA 12, and torch for CUDA 13; .*pip install 'nvidia-dali-cuda130>="),
        (
            [13, 12],
            13,
            r"^nvidia-dali-cuda130 and nvidia-dali-cuda120 .* pip uninstall nvidia-dali-cuda130 nvidia-dali-",
        ),
    ],
)
def test_the_cuda_version_of_the_package(installed: list[int], cuda: int, message: str | None) -> None:
    found = version_problem(installed, cuda)
    if message is None:
        assert found is None
    else:
        with pytest.raises(ConfigError, match=message):
            raise ConfigError(found or "")


def test_the_installed_dali_works_on_the_cpu_whatever_its_cuda_version() -> None:
    assert dali_installed()
    assert len(dali_trial._installed()) == 1
    assert dali_problem(False) is None


def test_a_dali_of_another_cuda_version_is_not_tried_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto takes the prefetcher and Pillow and says why; who asks for DALI is told what to install."""
    (built,) = dali_trial._installed()
    other = 25 - built  # 12 or 13
    monkeypatch.setattr(torch.version, "cuda", f"{other}.4")
    for module in (build, decode):
        monkeypatch.setattr(module, "dali_problem", dali_problem.__wrapped__)  # tries again
    name, why = choose_loader(DataConfig(loader="auto"), GPU)
    assert name == "prefetch"
    assert f"is for CUDA {built}, and torch for CUDA {other}" in why
    with pytest.raises(ConfigError, match=rf"--data.loader dali: .*nvidia-dali-cuda{other}0>=.*use --data.loader pref"):
        choose_loader(DataConfig(loader="dali"), GPU)
    assert choose_loader(DataConfig(loader="prefetch"), GPU) == ("prefetch", "")
    assert choose_loader(DataConfig(loader="auto"), CPU) == ("dali", "")
    transform = ImageTransform(64, "center", "bicubic")
    assert open_decoder("auto", transform, 1, GPU).name == "pillow"
    with pytest.raises(ConfigError, match=r"--decode dali: .*; or use --decode pillow"):
        open_decoder("dali", transform, 1, GPU)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param(
            "raise ImportError('libnvjpeg.so.12: cannot open shared object file')",
            "libnvjpeg.so.12: cannot open",
            marks=pytest.mark.nightly,
        ),
        (
            "def Pipeline(**_): raise RuntimeError('CUDA driver version is insufficient')",
            "driver version is insufficient",
        ),
    ],
)
def test_a_broken_dali_is_named_and_not_used(content: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "nvidia" / "dali").mkdir(parents=True)
    (tmp_path / "nvidia" / "__init__.py").touch()
    (tmp_path / "nvidia" / "dali" / "__init__.py").write_text(content)
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}, {str(ROOT / 'kernels')!r}]\n"
        "import torch\n"
        "from fastdiff.config.sections.data import DataConfig\n"
        "from fastdiff.data.loading.build import choose_loader\n"
        "print(*choose_loader(DataConfig(loader='auto'), torch.device('cpu')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("prefetch NVIDIA DALI fails here (")
    assert why in done.stdout
    assert "reinstall it: pip install 'nvidia-dali-cuda" in done.stdout


def _train_with_a_dali_that_fails_on_rank_1(world: World, config: RunConfig) -> str:
    broken = mock.patch.object(import_module("nvidia.dali"), "Pipeline", side_effect=RuntimeError("no decoder left"))
    dali_problem.cache_clear()
    with broken if world.rank else nullcontext(), pytest.raises(ConfigError) as caught:
        train(config, launch(), world)
    return str(caught.value)


def test_a_dali_that_fails_on_one_rank_ends_all(digits: Path, tmp_path: Path) -> None:
    """It is tried on the device of each."""
    config = tiny(digits, tmp_path / "run", data__loader="dali")
    first, second = run_ranks(_train_with_a_dali_that_fails_on_rank_1, config, ranks=2)
    assert first == second
    assert "--data.loader dali: NVIDIA DALI fails here (no decoder left)" in first
    assert not (tmp_path / "run").exists()


def test_the_package_that_is_named_fits_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for cuda, package in (
        ("12.8", "nvidia-dali-cuda120"),
        ("13.0", "nvidia-dali-cuda130"),
        (None, "nvidia-dali-cuda130"),
    ):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert f"'{package}>=" in install_dali()
