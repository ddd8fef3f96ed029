"""Check of a user's network before its first step."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fastdiff.config.networks.user_defined import plugin_of
from fastdiff.config.run import RunConfig
from fastdiff.errors import require
from fastdiff.models.blockwise import BlockwiseModel
from fastdiff.models.build import build_model
from fastdiff.models.cost.dry_network import dry_inputs
from fastdiff.models.kernel_choice import DTYPES
from fastdiff.plugins.promises import SAMPLES, require_by_position
from fastdiff.rng import Stream, normal

_MOVED = 0.02
"""Standard deviation of the numbers that are added to the weights: an output layer of zeros would hide the rest."""


def check_network(config: RunConfig, device: torch.device) -> None:
    """Require that the network of a file or of an installed package keeps the promises; ConfigError: it does not.

    A copy takes a forward and a backward pass on zeros and noise: shape and dtype of the output, numbers that follow
    from each sample alone, no host synchronisation, and a gradient for every parameter. Classes and the null class are
    given.
    """
    plugin = plugin_of(config.model.kind)
    if plugin is None:
        return
    what = f"--model.kind {plugin.text}"
    with plugin.blamed(what), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        network = build_model(config.model, attention="sdpa", seed=config.seed).to(device).train()
        names = set(network.inputs)
        noisy, condition = dry_inputs(config.model, names, SAMPLES)
        if "label" in condition:
            null = config.model.classes - config.model.needs_classes
            condition["label"] = torch.tensor([0, max(null, 0)]).repeat(SAMPLES // 2)
        noisy, condition = noisy.to(device), {name: value.to(device) for name, value in condition.items()}
        unknown = names - condition.keys()
        require(not unknown, f"{what}: its forward takes {', '.join(sorted(unknown))}, which the data do not have")
        _check_numbers(network, noisy, condition, what)
        _check_output_of_16_bits(
            DTYPES[config.performance.precision],
            network,
            {"noisy": noisy, "time": torch.zeros(len(noisy), device=device), **condition},
            what,
        )


def _check_numbers(network: BlockwiseModel, noisy: Tensor, condition: Mapping[str, Tensor], what: str) -> None:
    position = torch.arange(len(noisy), device=noisy.device)
    with torch.no_grad():
        for number, weight in enumerate(network.parameters()):
            at = torch.tensor([number], device=noisy.device)
            weight.add_(normal(0, Stream.NOISE, at, weight.shape)[0], alpha=_MOVED)
    inputs = {
        "noisy": normal(0, Stream.NOISE, position, noisy.shape[1:]),
        "time": torch.linspace(0, 999, len(noisy), device=noisy.device),
        **condition,
    }
    output = require_by_position(lambda given: _call(network, given, what), inputs, what)
    output.square().sum().backward()  # type: ignore[no-untyped-call]
    without = [name for name, weight in network.named_parameters() if weight.requires_grad and weight.grad is None]
    require(
        not without,
        f"{what}: no gradient reaches {', '.join(without[:3])}; use every parameter in forward, or remove it",
    )
    wrong = [n for n, weight in network.named_parameters() if weight.grad is not None and _not_finite(weight.grad)]
    require(not wrong, f"{what}: the gradient of {', '.join(wrong[:3])} is not finite for finite inputs")


def _check_output_of_16_bits(
    dtype: torch.dtype, network: BlockwiseModel, inputs: Mapping[str, Tensor], what: str
) -> None:
    """Run once with weights and noisy latents in the precision of the run, the time in fp32."""
    if dtype != torch.float32:
        with torch.no_grad():
            _call(network.to(dtype), {**inputs, "noisy": inputs["noisy"].to(dtype)}, what)


def _call(network: BlockwiseModel, inputs: Mapping[str, Tensor], what: str) -> Tensor:
    conditions = {name: value for name, value in inputs.items() if name not in ("noisy", "time")}
    noisy, config = inputs["noisy"], network.config
    output = network(noisy, inputs["time"], **conditions)
    expected = (len(noisy), noisy.shape[1] * (2 if config.learn_sigma else 1), *noisy.shape[2:])
    require(
        isinstance(output, Tensor) and tuple(output.shape) == expected and output.is_floating_point(),
        f"{what}: its forward returns {_described(output)}, expected floating point {list(expected)}",
    )
    found: Tensor = output
    return found


def _described(output: object) -> str:
    return f"{output.dtype} {list(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"


def _not_finite(values: Tensor) -> bool:
    return not bool(values.isfinite().all())
