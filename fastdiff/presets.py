"""Named, complete runs. The docstring of a preset is its command and its measured result."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial

from fastdiff.config import (
    DIT_PATCHES,
    DIT_SIZES,
    BatchConfig,
    DataConfig,
    DiffusionConfig,
    DiTConfig,
    EmaConfig,
    OptimConfig,
    OutputConfig,
    PerformanceConfig,
    RunConfig,
    dit_config,
)
from fastdiff.errors import ConfigError

Preset = Callable[[], RunConfig]


def digits() -> RunConfig:
    """8x8 digit scans, trained on two CPU cores in minutes: the first run on a new machine.

    fastdiff encode digits data/digits
    deepspeed fastdiff/train.py --preset digits --deepspeed_config deepspeed_configs/zero3.json
    fastdiff evaluate runs/digits

    Measured (bench/results/cpu-2-cores/2026-11-21_digits): accuracy 1.000, Fréchet distance 0.25, 116 s for the steps.
    """
    steps, batch = 1000, 64
    return RunConfig(
        samples=steps * batch,
        model=DiTConfig(depth=4, hidden=128, heads=4, patch=2, channels=1, size=8, classes=10),
        objective=DiffusionConfig(schedule="linear", prediction="v"),
        data=DataConfig(path="data/digits"),
        batch=BatchConfig(samples=batch),
        optim=OptimConfig(lr=2e-3, schedule="cosine", warmup_steps=80),
        ema=EmaConfig(rates=(0.99,)),
        performance=PerformanceConfig(precision="fp32"),
        output=OutputConfig(folder="runs/digits", log_every=20, checkpoint_every=250, sample_every=250),
    )


def dit(letter: str, patch: int) -> RunConfig:
    """A published size of DiT on 256-pixel images: latents of 4 x 32 x 32, 1000 classes. L and XL with 8-bit Adam.

    deepspeed fastdiff/train.py --preset dit-xl-2 --data.path DATA --deepspeed_config deepspeed_configs/zero1.json

    Not measured yet.
    """
    batch = 256
    return RunConfig(
        samples=400_000 * batch,
        model=dit_config(f"DiT-{letter}/{patch}"),
        data=DataConfig(path="data/imagenet256"),
        batch=BatchConfig(samples=batch),
        optim=OptimConfig(name="adamw8bit" if letter in ("L", "XL") else "adamw", lr=1e-4),
        output=OutputConfig(folder=f"runs/dit-{letter.lower()}-{patch}", checkpoint_every=10_000, sample_every=10_000),
    )


PRESETS: dict[str, Preset] = {"digits": digits} | {
    f"dit-{letter.lower()}-{patch}": partial(dit, letter, patch) for letter in DIT_SIZES for patch in DIT_PATCHES
}


def preset(name: str) -> RunConfig:
    """Return the preset called ``name``; ConfigError with the nearest name if there is none."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"--preset {name}: unknown; {hint}presets: {', '.join(PRESETS)}")
    return PRESETS[name]()
