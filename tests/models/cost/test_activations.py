"""Activations that are counted without memory: equal to those that a network really saves."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastdiff.config.presets import preset
from fastdiff.models.build import build_model
from fastdiff.models.cost.dry_network import dry_inputs
from fastdiff.models.cost.traced import trace
from fastdiff.models.kernel_choice import DTYPES

CPU = torch.device("cpu")


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["digits", "digits-t2i", "digits-adm"])
def test_the_count_is_what_a_network_saves(name: str) -> None:
    config = preset(name)
    noisy, condition = dry_inputs(config.model, config.model.conditions, 4)
    dtype = DTYPES[config.performance.precision]
    network = build_model(config.model).to(dtype)
    own = {p.untyped_storage().data_ptr() for p in network.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(value: Tensor) -> Tensor:
        kept[value.untyped_storage().data_ptr()] = value
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        network(noisy, torch.zeros(4), **condition)
    measured = sum(value.untyped_storage().nbytes() for place, value in kept.items() if place not in own) / 4
    assert trace(config, noisy, condition, CPU).saved == pytest.approx(measured, rel=0.01)


@pytest.mark.nightly
def test_a_gpu_keeps_what_its_kernels_keep() -> None:
    """DiT-XL/2 at 256 px, for which Inductor's code of the compiled blocks keeps 282 MB per image."""
    config = preset("dit-xl-2-256")
    found = trace(config, *dry_inputs(config.model, config.model.conditions, 2), torch.device("cuda")).saved
    assert found == pytest.approx(282e6, rel=0.02)
    plain = replace(config, performance=replace(config.performance, kernels="reference"))
    assert trace(plain, *dry_inputs(config.model, config.model.conditions, 2), torch.device("cuda")).saved > 1.1 * found
