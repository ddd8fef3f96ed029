"""A user's loss: opened, and checked by dry calls."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fastdiff.config.run import RunConfig
from fastdiff.diffusion.levels import Levels
from fastdiff.diffusion.objective import OwnLoss
from fastdiff.diffusion.processes import build_process
from fastdiff.errors import require
from fastdiff.plugins.promises import SAMPLES, require_by_position, without_host_sync
from fastdiff.plugins.user_code import load
from fastdiff.rng import Stream, normal, uniform


def open_loss(config: RunConfig, device: torch.device) -> OwnLoss | None:
    """Return the loss that ``config.objective.plugin`` names, after a check; None: there is none.

    Args:
        config: of the run.
        device: of the run, on which the loss is called.

    Raises:
        ConfigError: it cannot be opened or breaks a promise.
    """
    text = config.objective.plugin
    if not text:
        return None
    flag = "--objective.plugin"
    plugin, what = load(text, "fastdiff.objectives", flag), f"{flag} {text}"
    loss: OwnLoss = plugin.found
    require(callable(loss), f"{what}: expected a function of prediction, target, levels and position")
    with plugin.blamed(flag):
        _check(loss, config, device, what)
    return loss


def _check(loss: OwnLoss, config: RunConfig, device: torch.device, what: str) -> None:
    process = build_process(config.objective, device, config.timesteps)
    position = torch.arange(SAMPLES, device=device)
    shape = (config.model.channels, config.model.size, config.model.size)
    inputs = {
        "prediction": normal(0, Stream.NOISE, position, shape).requires_grad_(),
        "target": normal(1, Stream.NOISE, position, shape),
        "native": process.draw(uniform(0, Stream.TIMESTEP, position, 1)[:, 0]),
        "position": position,
    }

    def call(given: Mapping[str, Tensor]) -> Tensor:
        levels: Levels = process.levels(given["native"])
        found = loss(given["prediction"], given["target"], levels, given["position"])
        require(
            isinstance(found, Tensor) and found.shape == given["position"].shape and found.is_floating_point(),
            f"{what} returns {_described(found)} for {len(given['position'])} samples, expected one loss each: "
            f"floating point [{len(given['position'])}]",
        )
        return found

    losses = require_by_position(call, inputs, what)
    require(losses.requires_grad, f"{what} returns losses without a gradient; do not detach the prediction")
    with without_host_sync(what):
        (gradient,) = torch.autograd.grad(losses.sum(), inputs["prediction"])
    require(bool(gradient.isfinite().all()), f"{what}: its gradient is not finite for finite inputs")


def _described(found: object) -> str:
    return f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
