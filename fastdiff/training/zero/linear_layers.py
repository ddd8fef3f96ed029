"""The function of linear layers, which DeepSpeed replaces for the whole process under ZeRO-3."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional

from fastdiff.config.deepspeed import DsConfig


@contextmanager
def linear_layers_of(ds_config: DsConfig) -> Iterator[None]:
    """Use the function that a run will have, to count what it saves: DeepSpeed's keeps inputs of frozen layers, too."""
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    before = functional.linear
    zero3 = ds_config.get("zero_optimization", {}).get("stage") == 3
    functional.linear = zero3_linear_wrap if zero3 else torch._C._nn.linear  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.linear = before
