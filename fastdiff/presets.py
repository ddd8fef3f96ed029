"""Named, complete runs. The docstring of a preset is its command and its measured result."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from fastdiff.config import (
    BatchConfig,
    DataConfig,
    DiffusionConfig,
    DiTConfig,
    EmaConfig,
    OptimConfig,
    OutputConfig,
    PerformanceConfig,
    RunConfig,
)
from fastdiff.errors import ConfigError

Preset = Callable[[], RunConfig]


def digits() -> RunConfig:
    """8x8 digit scans, trained on two CPU cores in minutes: the first run on a new machine.

    fastdiff encode digits data/digits
    deepspeed fastdiff/train.py --preset digits --deepspeed_config deepspeed_configs/zero3.json
    fastdiff evaluate runs/digits
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


def dit(size: str, patch: int) -> RunConfig:
    """A DiT on 256-pixel images (latents of 4 x 32 x 32, 1000 classes), with 8-bit Adam.

    deepspeed fastdiff/train.py --preset dit-xl-2 --data.path DATA --deepspeed_config deepspeed_configs/zero1.json
    """
    depth, hidden, heads = {"s": (12, 384, 6), "b": (12, 768, 12), "l": (24, 1024, 16), "xl": (28, 1152, 16)}[size]
    name = f"dit-{size}-{patch}"
    return RunConfig(
        samples=400_000 * 256,
        model=DiTConfig(depth=depth, hidden=hidden, heads=heads, patch=patch),
        data=DataConfig(path="data/imagenet256"),
        batch=BatchConfig(samples=256),
        optim=OptimConfig(name="adamw8bit-bnb" if size in ("l", "xl") else "adamw", lr=1e-4),
        output=OutputConfig(folder=f"runs/{name}", checkpoint_every=10_000, sample_every=10_000),
    )


PRESETS: dict[str, Preset] = {"digits": digits} | {
    f"dit-{size}-{patch}": partial(dit, size, patch) for size in ("s", "b", "l", "xl") for patch in (2, 4, 8)
}


def preset(name: str) -> RunConfig:
    """Return the preset called ``name``; ConfigError with the nearest name if there is none."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"--preset {name}: unknown; {hint}presets: {', '.join(PRESETS)}")
    config = PRESETS[name]()
    return config if config.output.folder else replace(config, output=replace(config.output, folder=f"runs/{name}"))
