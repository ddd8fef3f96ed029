"""Initial weights of benchmarks: drawn where the network trains."""

from dataclasses import replace

import pytest
import torch

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.presets import preset
from fastdiff.config.run import RunConfig
from fastdiff.models.load import build_network
from fastdiff_bench.trainers import plain_network
from fastdiff_bench.trainers.initial_weights import drawn_on


@pytest.fixture
def config() -> RunConfig:
    return replace(preset("digits"), model=DiTConfig(size=8, channels=1, hidden=32, depth=1, heads=2))


def test_weights_are_drawn_where_the_network_trains(config: RunConfig) -> None:
    """``meta`` stands for a GPU; on a CPU they are those of training."""
    here = build_network(config).state_dict()
    with drawn_on(torch.device("meta")):
        assert {value.device.type for value in build_network(config).parameters()} == {"meta"}
    with drawn_on(torch.device("cpu")):
        same = build_network(config).state_dict()
    assert all(torch.equal(same[name], value) for name, value in here.items())
    assert build_network(config).state_dict().keys() == here.keys(), "as before"


def test_the_plain_network_has_the_weights_of_training_on_a_cpu(config: RunConfig) -> None:
    plain = plain_network.network(config, torch.device("cpu"), best=False)
    here = build_network(config).state_dict()
    assert all(torch.equal(plain.state_dict()[name], value) for name, value in here.items())
