"""The network of a run as a plan needs it, read on the device ``meta``: nothing is allocated."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from fastdiff.batch import Condition
from fastdiff.config.networks.routing import SCORES
from fastdiff.config.optimizers.registry import family_of
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.errors import ConfigError
from fastdiff.models.cost.dry_network import dry_inputs, dry_network
from fastdiff.models.cost.flops import update_flops
from fastdiff.models.cost.memory import buffer_bytes, frozen_bytes
from fastdiff.models.cost.traced import Recording, Traced, record
from fastdiff.models.matrices import Shapes, elements_in, matrices_of
from fastdiff.models.quantized import quantized_weights

TRACED = 2
"""Samples of the pass that is traced: one has other strides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Counts of a network."""

    parameters: tuple[int, ...]
    """Elements of each trained parameter: with a LoRA those of the adapter."""
    in_matrices: int
    """Elements of those in which the network declares matrices to the optimizer of the run."""
    update_flops: tuple[int, ...]
    """Operations of that optimizer on the matrices in each trained parameter; 0: it has none."""
    frozen_parameters: tuple[int, ...]
    """Elements of each frozen parameter; those that a LoRA quantises are buffers."""
    frozen: int
    """Number of frozen weights of the network, quantised ones included."""
    frozen_bytes: int
    buffer_bytes: int
    blocks: int
    """Number of its blocks."""
    recorded: Mapping[int, Recording]
    """Forward and backward passes, by the number of blocks that keep their activations."""
    dense_recorded: Mapping[int, Recording] = field(default_factory=dict)
    """The same with all tokens in all blocks, where the rest of the training leaves some out; empty: there are none."""
    dense_share: float = 0.0
    """Their share of the training."""
    _traced: dict[int, Traced] = field(default_factory=dict, init=False, repr=False, compare=False)

    def stored(self, performance: PerformanceConfig) -> int:
        """Return the number of blocks that keep their activations."""
        return performance.stored_blocks if performance.recompute else self.blocks

    def traced(self, performance: PerformanceConfig) -> Traced:
        """Return the counts of a pass with as much recomputation as ``performance`` asks; the mean of the training.

        Raises:
            KeyError: neither this pass was read, nor both that recompute none and all of the blocks.
        """
        stored = self.stored(performance)
        if stored not in self._traced:
            found = self._recording(self.recorded, stored).traced()
            if self.dense_recorded:
                found = found.joined(self._recording(self.dense_recorded, stored).traced(), self.dense_share)
            self._traced[stored] = found
        return self._traced[stored]

    def _recording(self, recorded: Mapping[int, Recording], stored: int) -> Recording:
        if stored in recorded:
            return recorded[stored]
        return recorded[0].storing(recorded[self.blocks], self.blocks - stored)

    @property
    def trained(self) -> int:
        """Number of trained parameters."""
        return sum(self.parameters)


def read_network(
    config: RunConfig,
    device: torch.device,
    inputs: tuple[Tensor, Condition] | None = None,
    *,
    varies: bool = False,
) -> Network:
    """Count the network of a run.

    Args:
        config: of the run.
        device: of the run, which decides between kernels and references.
        inputs: latents ``[2, C, H, W]`` and conditions of two samples; None: as ``config.model`` has them.
        varies: whether any number of blocks may be recomputed, not that of the run alone.

    Raises:
        ConfigError: the network asks for values, which nothing has here; or its LoRA cannot be built.
    """
    from torch._subclasses import fake_tensor  # its import takes a second

    network = dry_network(config)
    shapes = {name: tuple(p.shape) for name, p in network.named_parameters() if p.requires_grad}
    in_matrices, flops = _of_matrices(config, shapes)
    frozen_parameters = tuple(p.numel() for p in network.parameters() if not p.requires_grad)
    noisy, condition = inputs or dry_inputs(config.model, network.inputs, TRACED)
    precision, blocks = config.performance.precision, len(network.blocks_in_order())
    dense = 1.0 - config.dense_from / config.samples

    def recorded(given: Condition) -> dict[int, Recording]:
        return {
            stored: record(replace(config, performance=performance), noisy, given, device)
            for stored, performance in _recomputations(config.performance, blocks, varies=varies)
        }

    try:
        passes = recorded(condition)
        with_all = recorded({name: value for name, value in condition.items() if name != SCORES}) if dense else {}
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
        parameters=tuple(map(prod, shapes.values())),
        in_matrices=in_matrices,
        update_flops=flops,
        frozen_parameters=frozen_parameters,
        frozen=sum(frozen_parameters) + sum(quantized_weights(network)),
        frozen_bytes=frozen_bytes(network, precision),
        buffer_bytes=buffer_bytes(network),
        blocks=blocks,
        recorded=passes,
        dense_recorded=with_all,
        dense_share=dense,
    )


def _of_matrices(config: RunConfig, shapes: Shapes) -> tuple[int, tuple[int, ...]]:
    """Return the elements of trained parameters with matrices, and the operations of an update on each parameter."""
    matrices = matrices_of(config, shapes)
    flops = update_flops(family_of(config.optim), matrices)
    return elements_in(matrices, shapes), tuple(flops.get(name, 0) for name in shapes)


def _recomputations(
    performance: PerformanceConfig, blocks: int, *, varies: bool
) -> Iterator[tuple[int, PerformanceConfig]]:
    """Yield the passes to read, with the number of blocks that keep their activations."""
    if varies:
        yield 0, replace(performance, recompute=True, stored_blocks=0)
        yield blocks, replace(performance, recompute=False, stored_blocks=0)
    else:
        yield performance.stored_blocks if performance.recompute else blocks, performance
