"""Initial weights of a network, drawn where it trains: on a CPU those of DiT-XL/2 take a process seconds."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from fastdiff.config.networks.registry import ModelConfig
from fastdiff.models import load
from fastdiff.models.build import Model, build_model
from fastdiff.models.family import family_of


@contextmanager
def drawn_on(device: torch.device) -> Iterator[None]:
    """Let ``load.build_network`` draw on a GPU, if it is one; the values are others, on all ranks the same.

    Their values do not affect the time. A network whose constructor depends on values stays on the CPU.
    """

    def build(config: ModelConfig, *, seed: int = 0, **options: Any) -> Model:
        if device.type == "cpu" or not family_of(config).draws_on_meta:
            return build_model(config, seed=seed, **options)
        seed &= 2**64 - 1
        torch.manual_seed(seed)
        with torch.device(device):
            return family_of(config).build(config, seed=seed, **options)

    with patch.object(load, "build_model", build):
        yield
