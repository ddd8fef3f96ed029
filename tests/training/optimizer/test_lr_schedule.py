"""The learning-rate schedules equal those of diffusers and transformers to the bit, before and after the end."""

from itertools import product
from typing import Any, get_args, get_type_hints

import pytest
import torch

from fastdiff.config.optimizers.adamw import AdamWConfig
from fastdiff.errors import ConfigError
from fastdiff.training.optimizer.build import build_lr_schedule, lr_after, set_lr_step
from fastdiff.training.optimizer.lr_schedule import lr_factor

NAMES = get_args(get_type_hints(AdamWConfig)["schedule"])
LENGTHS = ((1, 0), (7, 0), (40, 10), (40, 39), (40, 40), (10, 40), (1000, 37))
"""Steps of the run, and of the warm-up."""


def optimizer(lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1)], lr=lr)


def get_scheduler(library: str) -> Any:
    if library == "diffusers":
        from diffusers.optimization import get_scheduler
    else:
        from transformers import get_scheduler
    return get_scheduler


@pytest.mark.parametrize("library", ["diffusers", "transformers"])
@pytest.mark.parametrize("name", NAMES)
def test_equal_to_the_bit(name: str, library: str) -> None:
    for (steps, warmup), lr in product(LENGTHS, (1e-4, 3e-3, 1.0 / 3)):
        if name == "constant" and warmup:
            continue  # refused
        config = AdamWConfig(lr=lr, schedule=name, warmup_steps=warmup)  # type: ignore[arg-type]
        theirs = get_scheduler(library)(name, optimizer(lr), num_warmup_steps=warmup, num_training_steps=steps)
        ours, factor = build_lr_schedule(optimizer(lr), config, steps), lr_factor(config, steps)
        for applied in range(2 * steps + 3):
            if name == "polynomial" and applied == steps == warmup:
                assert lr * factor(applied) == pytest.approx(1e-7)  # they divide by zero
                continue
            expected = lr * theirs.lr_lambdas[0](applied)
            set_lr_step(ours, applied)
            assert ours.optimizer.param_groups[0]["lr"] == expected, (steps, warmup, lr, applied)
            assert lr_after(config, steps, applied) == expected


def test_polynomial_needs_a_rate_above_its_end() -> None:
    with pytest.raises(ConfigError, match=r"--optim.lr 1e-07 with --optim.schedule polynomial"):
        AdamWConfig(lr=1e-7, schedule="polynomial")
