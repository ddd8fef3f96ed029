"""Floating-point operations of the models.

One multiply-add counts as two operations. A backward pass costs twice a forward pass, except in the layers after the
inputs, which need no gradient. (The "119 Gflops" of the DiT paper for XL/2 are multiply-adds.)
"""

from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.optimizers.family import OptimizerFamily
from fastdiff.config.run import RunConfig
from fastdiff.models.family import family_of
from fastdiff.models.fused import Matrices


def forward_flops(config: ModelConfig) -> float:
    """Return the operations of one forward pass on one sample (matrix products and convolutions only).

    A UNet is counted with latents of ``config.size`` and captions of 77 tokens. For the published SD 1.5 at 64 x 64
    this gives 0.40 T multiply-adds, which agrees with ``torch.utils.flop_counter``.
    """
    return 2.0 * family_of(config).multiply_adds(config)


def training_flops(config: ModelConfig, *, adapter: bool = False, dream: bool = False, dense: float = 0.0) -> float:
    """Return the operations of a training step on one sample, without recomputation.

    Args:
        config: configuration of the network.
        adapter: whether the weights are frozen (LoRA), so that their gradient is not computed.
        dream: whether DREAM's estimate costs another forward pass.
        dense: share of the steps in which a network with ``ModelConfig.route`` leaves no token out.
    """
    family = family_of(config)
    forward = forward_flops(config) - (1.0 - dense) * 2.0 * family.saved_multiply_adds(config)
    return (3.0 - adapter + dream) * forward - 2.0 * family.input_multiply_adds(config)


def run_flops(config: RunConfig, model: ModelConfig | None = None, *, dense: float | None = None) -> float:
    """Return the operations of a training step of a run on one sample, without recomputation.

    Args:
        config: of the run.
        model: its network for samples of another size; None: at its own.
        dense: as of ``training_flops``; None: that of the whole run, so that this is the mean of its steps.
    """
    dream = config.objective.takes_two_passes
    dense = 1.0 - config.dense_from / config.samples if dense is None else dense
    own = config.model if model is None else model
    return training_flops(own, adapter=config.lora.rank > 0, dream=dream, dense=dense)


def update_flops(family: OptimizerFamily, matrices: Matrices) -> dict[str, int]:
    """Return the operations of an optimizer step on the matrices in each weight, by name; empty: it asks for none.

    They are no part of ``run_flops``, so that MFU counts what the network needs whatever the optimizer is.
    """
    if (step := family.matrix_step) is None:
        return {}
    return {
        name: sum(step.flops(matrix.groups * height, matrix.columns) for height in matrix.heights)
        for name, matrix in matrices.items()
    }


def self_attention_multiply_adds(width: int, positions: int) -> int:
    """Return the multiply-adds of self-attention over ``positions``, with its projections, per sample."""
    return positions * (4 * width**2 + 2 * positions * width)


def res_block_multiply_adds(inputs: int, width: int, positions: int, time: int) -> int:
    """Return the multiply-adds of a residual block: two 3 x 3 convolutions, shortcut and time projection."""
    shortcut = inputs * width if inputs != width else 0
    return positions * (9 * (inputs + width) * width + shortcut) + time * width
