"""The masked loss: no gradient outside of the mask, and inside it that of the whole loss, for every part of a loss."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.diffusion.objective import Objective
from tests.support.inputs.objectives import objective_of

LOSSES: dict[str, dict[str, Any]] = {
    "v": {"prediction": "v"},
    "min-snr": {"prediction": "epsilon", "min_snr_gamma": 5.0},
    "pyramid": {"prediction": "epsilon", "multires_noise_iterations": 2, "noise_offset": 0.1},
    "learned variance": {"prediction": "epsilon", "variance": "learned_range", "loss": "rescaled_mse"},
    "bound": {"prediction": "epsilon", "variance": "learned", "loss": "kl"},
    "cosine": {"process": "flow", "prediction": "flow", "cosine_weight": 0.5},
    "x0 of flow": {"process": "flow", "prediction": "x0"},
    "edm": {"process": "edm"},
}
SIZE = 6


def batch_of(mask: Tensor | None) -> Batch:
    generator = torch.Generator().manual_seed(3)
    return Batch(torch.randn(SIZE, 4, 8, 8, generator=generator).clamp(-1, 1), torch.arange(40, 40 + SIZE), {}, mask)


def masks() -> Tensor:
    """A square, a column, all, nothing, and weights from 0 to 1."""
    mask = torch.zeros(SIZE, 8, 8)
    mask[0, 2:6, 3:7], mask[1, :, 5], mask[2] = 1, 1, 1
    mask[4:] = torch.linspace(-0.5, 1.5, 2 * 64).view(2, 8, 8).clamp(0, 1)
    return mask.half()


def losses_and_gradient(name: str, mask: Tensor | None, **changes: Any) -> tuple[Tensor, Tensor]:
    config = objective_of(**{**LOSSES[name], **changes})
    objective = Objective(config, seed=1, null={}, device="cpu")
    batch = batch_of(mask)
    corruption = objective.add_noise(batch)
    channels = 8 if config.learns_variance else 4
    prediction = torch.randn(SIZE, channels, 8, 8, generator=torch.Generator().manual_seed(4)).requires_grad_()
    losses = objective.loss(prediction, batch, corruption)
    (gradient,) = torch.autograd.grad(losses.sum(), prediction)
    return losses, gradient


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_0_outside_of_the_mask_and_weighted_inside(name: str) -> None:
    mask = masks()
    losses, gradient = losses_and_gradient(name, mask)
    whole, of_whole = losses_and_gradient(name, None)
    outside = (mask == 0)[:, None].expand_as(gradient)
    assert outside[:4].any(dim=(1, 2, 3)).tolist() == [True, True, False, True]
    assert (gradient[outside] == 0).all()
    assert (of_whole[outside] != 0).any()
    torch.testing.assert_close(gradient, of_whole * mask[:, None], rtol=1e-5, atol=1e-9)
    assert losses[3] == 0
    torch.testing.assert_close(losses[2], whole[2], rtol=1e-6, atol=0)
    rest, _ = losses_and_gradient(name, 1 - mask)  # the mean is over all elements, so the two add up
    torch.testing.assert_close(losses + rest, whole, rtol=1e-3, atol=1e-6)


def test_without_the_flag_masks_are_left_out_to_the_bit() -> None:
    for got, expected in zip(
        losses_and_gradient("v", masks(), masked=False), losses_and_gradient("v", None), strict=True
    ):
        assert torch.equal(got, expected)


def test_a_mask_of_ones_is_none() -> None:
    ones = replace(batch_of(None), mask=torch.ones(SIZE, 8, 8).half()).mask
    (losses, gradient), (plain, of_plain) = losses_and_gradient("v", ones), losses_and_gradient("v", None)
    assert torch.equal(gradient, of_plain)
    torch.testing.assert_close(losses, plain, rtol=1e-6, atol=0)
