"""What must not depend on the device: random numbers, noisy latents, and the steps of the 8-bit optimizer."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.config.sections.objective import DdpmConfig, EdmConfig, FlowConfig, ObjectiveConfig
from fastdiff.diffusion.objective import Objective
from fastdiff.rng import Stream, normal, uniform
from fastdiff_kernels import dispatch
from fastdiff_kernels.adamw8bit import AdamW8bit
from tests.support.nights import by_day

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
POSITIONS = torch.tensor([0, 5, 2**32 - 1, 2**32, 2**45 + 3])


def kernels(device: str) -> Any:
    """Of this device: compiled on a GPU, interpreted on a CPU."""
    if device == "cuda" and not torch.cuda.is_available():
        raise AssertionError("no CUDA device")
    return dispatch.forced(philox="triton", noising="triton", loss="triton", adamw8bit="triton")


def references() -> Any:
    """Plain torch, on the CPU."""
    return dispatch.forced(philox="reference", noising="reference", loss="reference", adamw8bit="reference")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stream", [Stream.NOISE, Stream.TIMESTEP])
def test_random_numbers_are_those_of_the_reference(device: str, stream: Stream) -> None:
    with references():
        expected = [uniform(2**63 + 7, stream, POSITIONS, 515), normal(3, stream, POSITIONS, (4, 9, 7))]
    with kernels(device):
        place = POSITIONS.to(device)
        found = [uniform(2**63 + 7, stream, place, 515), normal(3, stream, place, (4, 9, 7))]
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.cpu(), b)


OBJECTIVES: list[tuple[ObjectiveConfig, bool]] = [
    (DdpmConfig(noise_offset=0.1, input_perturbation=0.1, condition_dropout=0.5), True),
    (FlowConfig(prediction="flow"), False),
    (EdmConfig(), True),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", by_day([torch.float16], torch.float32))
@pytest.mark.parametrize(("config", "posterior"), OBJECTIVES, ids=["ddpm", "flow", "edm"])
def test_noisy_latents_levels_and_drops_are_those_of_the_reference(
    device: str, dtype: torch.dtype, config: ObjectiveConfig, posterior: bool
) -> None:
    """Tables, levels, noise, posterior sample and rounding."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(5, 8 if posterior else 4, 8, 8, generator=generator)
    label = torch.arange(5)

    def corrupted(where: str) -> dict[str, Tensor]:
        objective = Objective(
            config, seed=11, null={"label": torch.tensor(10)}, device=where, posterior=posterior, dtype=dtype
        )
        found = objective.add_noise(Batch(latents.to(where), POSITIONS.to(where), {"label": label.to(where)}))
        return {"noisy": found.noisy, "time": found.time, **found.condition}

    with references():
        expected = corrupted("cpu")
    with kernels(device):
        found = corrupted(device)
    assert expected["noisy"].dtype == dtype
    for name, value in expected.items():
        assert torch.equal(found[name].cpu(), value), name


@pytest.mark.parametrize("device", DEVICES)
def test_steps_of_the_8bit_optimizer_are_those_of_the_reference(device: str) -> None:
    """Parameters and moments after three steps."""

    def stepped(where: str) -> dict[str, Tensor]:
        weight = torch.linspace(-1, 1, 1000).to(where)
        optimizer = AdamW8bit([weight], lr=1e-2, weight_decay=0.1)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            weight.grad = torch.randn(1000, generator=generator).to(where)
            optimizer.step()
        state = {name: value for name, value in optimizer.state[weight].items() if isinstance(value, Tensor)}
        return {"weight": weight, **state}

    with references():
        expected = stepped("cpu")
    with kernels(device):
        found = stepped(device)
    assert expected.keys() == found.keys() > {"weight"}
    assert expected["exp_avg_codes"].any()
    for name, value in expected.items():
        assert torch.equal(found[name].cpu(), value), name
