"""Coordinate check: how far the activations of networks of several widths move in their first steps.

Under muP every change is about as large at every width; otherwise some grow with the width, and the best learning rate
falls (Yang et al. 2022, arXiv:2203.03466, appendix D.1).
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.batch import Condition
from fastdiff.conditions import TEACHER_TOKEN
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.optimizers.adamw import AdamWConfig
from fastdiff.models.build import build_model
from fastdiff.training.optimizer.build import build_optimizer

_SAMPLES = 16
_SEEDS = 3
Changes = Mapping[str, Sequence[float]]
"""By part of the network: mean absolute change of its output after each step."""
_CONDITIONS: Mapping[str, Callable[[ModelConfig, torch.Generator], Tensor]] = {
    "label": lambda config, generator: torch.randint(config.classes + 1, (_SAMPLES,), generator=generator),
    "context": lambda config, generator: torch.randn(_SAMPLES, *config.conditions["context"], generator=generator),
    "context_mask": lambda config, generator: torch.ones(
        _SAMPLES, *config.conditions["context_mask"], dtype=torch.bool
    ),
    "time_ids": lambda config, generator: 256 + 768 * torch.rand(_SAMPLES, 6, generator=generator),
}
"""Draws of the conditions."""
_PARTS: Mapping[str, Mapping[str, str]] = {
    "dit": {
        "patches": "x_embedder", "time": "t_embedder", "class": "y_embedder", "attention": r"blocks\.\d+\.attn",
        "MLP": r"blocks\.\d+\.mlp", "modulations": r"blocks\.\d+\.adaLN_modulation", "blocks": r"blocks\.\d+",
        "output": r"final_layer\.linear",
    },
    "pixart": {
        "patches": "pos_embed", "time": r"adaln_single\.emb", "caption": "caption_projection",
        "attention": r"transformer_blocks\.\d+\.attn1", "cross-attention": r"transformer_blocks\.\d+\.attn2",
        "MLP": r"transformer_blocks\.\d+\.ff", "modulations": r"adaln_single\.linear",
        "blocks": r"transformer_blocks\.\d+", "output": "proj_out",
    },
}  # fmt: skip
"""By kind of network and part: pattern of the names of its modules."""


def measured(configs: Sequence[ModelConfig], *, steps: int, lr: float) -> dict[int, Changes]:
    """Train each network on random samples by AdamW in fp32, and return the changes by width.

    Args:
        configs: of DiTs or PixArts of other widths, with equal conditions.
        steps: of the optimizer.
        lr: learning rate of parameters whose multiplier is 1.
    """
    return {config.hidden: _changes(config, steps, lr) for config in configs}


def slopes(found: Mapping[int, Changes]) -> dict[str, float]:
    """Return the exponent of the width in the change of each part after the last step, by least squares of logarithms.

    0: the change is equal at every width.
    """
    widths = torch.tensor(sorted(found), dtype=torch.float64).log()
    centred = widths - widths.mean()
    last = {part: [found[width][part][-1] for width in sorted(found)] for part in next(iter(found.values()))}
    return {
        part: float(centred @ torch.tensor(values, dtype=torch.float64).log() / centred.square().sum())
        for part, values in last.items()
    }


def _changes(config: ModelConfig, steps: int, lr: float) -> dict[str, list[float]]:
    """Mean over several seeds."""
    runs = [_one(config, steps, lr, seed) for seed in range(_SEEDS)]
    return {
        part: [sum(run[part][step] for run in runs) / len(runs) for step in range(steps)]
        for part in runs[0]
    }  # fmt: skip


def _one(config: ModelConfig, steps: int, lr: float, seed: int) -> dict[str, list[float]]:
    model = build_model(config, seed=seed)
    named = dict(model.named_parameters())
    optimizer = build_optimizer(
        named.values(), AdamWConfig(lr=lr), skip_non_finite=False, multipliers=map(config.lr_multiplier, named)
    )
    noisy, time, condition, targets = _samples(config, seed)
    first: dict[str, Tensor] = {}
    changes: dict[str, list[float]] = {}
    for step in range(steps + 1):
        with _outputs(_parts(model, config.kind)) as outputs:
            got = model(noisy, time, **condition)
        found = {part: torch.stack([value.detach() for value in values]) for part, values in outputs.items()}
        if step == 0:
            first = found
        for part, value in found.items() if step else ():
            changes.setdefault(part, []).append(float((value - first[part]).abs().mean()))
        optimizer.zero_grad()
        predicted = [got] if isinstance(got, Tensor) else [value for value in got if value is not None]
        torch.stack([F.mse_loss(*pair) for pair in zip(predicted, targets, strict=True)]).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return changes


def _samples(config: ModelConfig, seed: int) -> tuple[Tensor, Tensor, Condition, list[Tensor]]:
    """Noisy latents, times and conditions of a forward pass, and targets; equal at every width."""
    generator = torch.Generator().manual_seed(seed)
    channels = config.channels * (2 if config.learn_sigma else 1)
    noisy = torch.randn(_SAMPLES, config.channels, config.size, config.size, generator=generator)
    time = 1000 * torch.rand(_SAMPLES, generator=generator)
    condition = {name: draw(config, generator) for name, draw in _CONDITIONS.items() if name in config.conditions}
    target = torch.randn(_SAMPLES, channels, config.size, config.size, generator=generator)
    token = torch.randn(2, _SAMPLES, config.teacher_width, generator=generator)
    if not config.teacher_width:
        return noisy, time, condition, [target]
    return noisy, time, condition | {TEACHER_TOKEN: token[0]}, [target, token[1]]


def _parts(model: nn.Module, kind: str) -> dict[str, list[nn.Module]]:
    """Modules by the name of the part."""
    named = dict(model.named_modules())
    return {
        part: [module for name, module in named.items() if re.fullmatch(pattern, name)]
        for part, pattern in _PARTS[kind].items()
    }


@contextmanager
def _outputs(parts: Mapping[str, Sequence[nn.Module]]) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the outputs of the modules; of several outputs the first."""
    found: dict[str, list[Tensor]] = {part: [] for part in parts}
    handles = [
        module.register_forward_hook(
            lambda _, __, output, into=found[part]: into.append(output if isinstance(output, Tensor) else output[0])
        )
        for part, modules in parts.items()
        for module in modules
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
