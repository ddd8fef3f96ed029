"""The network of a run as a plan needs it, read on the device ``meta``: nothing is allocated."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastdiff.batch import Condition
from fastdiff.config.run import RunConfig
from fastdiff.errors import ConfigError
from fastdiff.models.cost.dry_network import dry_inputs, dry_network
from fastdiff.models.cost.memory import buffer_bytes, frozen_bytes
from fastdiff.models.cost.traced import Traced, trace
from fastdiff.models.quantized import quantized_weights

TRACED = 2
"""Samples of the pass that is traced: one has other strides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Counts of a network."""

    parameters: tuple[int, ...]
    """Elements of each trained parameter: with a LoRA those of the adapter."""
    frozen_parameters: tuple[int, ...]
    """Elements of each frozen parameter; those that a LoRA quantises are buffers."""
    frozen: int
    """Number of frozen weights of the network, quantised ones included."""
    frozen_bytes: int
    buffer_bytes: int
    passes: Mapping[bool, Traced]
    """A forward and backward pass, without and with recomputation."""

    @property
    def trained(self) -> int:
        """Number of trained parameters."""
        return sum(self.parameters)


def read_network(
    config: RunConfig,
    device: torch.device,
    recompute: tuple[bool, ...] = (False, True),
    inputs: tuple[Tensor, Condition] | None = None,
) -> Network:
    """Count the network of a run.

    Args:
        config: of the run.
        device: of the run, which decides between kernels and references.
        recompute: the passes to trace.
        inputs: latents ``[2, C, H, W]`` and conditions of two samples; None: as ``config.model`` has them.

    Raises:
        ConfigError: the network asks for values, which nothing has here; or its LoRA cannot be built.
    """
    from torch._subclasses import fake_tensor  # its import takes a second

    network = dry_network(config)
    frozen_parameters = tuple(p.numel() for p in network.parameters() if not p.requires_grad)
    noisy, condition = inputs or dry_inputs(config.model, network.inputs, TRACED)
    precision = config.performance.precision
    try:
        passes = {
            again: trace(
                replace(config, performance=replace(config.performance, recompute=again)), noisy, condition, device
            )
            for again in recompute
        }
    except (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException,
        fake_tensor.UnsupportedOperatorException,
    ) as error:  # of a network of another package
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ConfigError(
            f"this network does not run without data ({reason}): it cannot be planned; measure it with `bench step`"
        ) from error
    return Network(
        parameters=tuple(p.numel() for p in network.parameters() if p.requires_grad),
        frozen_parameters=frozen_parameters,
        frozen=sum(frozen_parameters) + sum(quantized_weights(network)),
        frozen_bytes=frozen_bytes(network, precision),
        buffer_bytes=buffer_bytes(network),
        passes=passes,
    )
