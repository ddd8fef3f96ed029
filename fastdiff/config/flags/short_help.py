"""The short help of the trainer: the flags that people turn, with the values of the preset."""

from __future__ import annotations

import inspect
from typing import Any

from fastdiff.config.presets import PRESETS, listed_presets
from fastdiff.config.run import RunConfig

SHOWN: dict[str, dict[str, str]] = {
    "Start": {
        "--preset NAME": "a complete run; each further flag changes one field of it",
        "--config FILE": "YAML or JSON with fields of the run, or the run.json of an earlier run",
        "--ranks K": "processes, one per GPU; default: the visible GPUs (fastdiff train only)",
        "--deepspeed_config NAME": "ddp, zero1, zero2, zero3, zero3_offload or a JSON file; default: zero1",
        "--resume auto|must|never": "continue the run in the folder, if there is one",
        "--allow-change FIELD": "accept a change of this field in a resumed run",
        "--dry-run": "print the configuration and stop",
        "--quiet": "tell only warnings, errors and results",
        "--verbose": "tell details, and the traceback of an error",
    },
    "Length (give one)": {
        "--steps N": "optimizer steps",
        "--epochs N": "passes over the data set",
        "--samples": "training samples",
    },
    "Data": {
        "--data.path": "output folder of `fastdiff encode`",
        "--data.random-flip": "mirror half of the images",
        "--validation.data": "held-out data set; its loss is measured",
        "--validation.every": "steps between validations",
        "--validation.prompts": "prompts of the sample images",
        "--validation.captions": "or as many captions of the data",
    },
    "Batch": {
        "--batch.samples": "samples per optimizer step, over all ranks",
        "--batch.micro": "samples per rank and forward pass; auto: what the memory holds",
    },
    "Network": {
        "--model.size": "height and width of the latents; the data set's",
        "--model.channels": "channels of the latents; the data set's",
        "--model.classes": "number of classes; the data set's",
        "--pretrained.path": "pipeline of diffusers, or a published file",
        "--lora.rank": "rank of a LoRA adapter; 0: train all weights",
        "--objective.prediction": "what the network predicts",
    },
    "Optimizer": {
        "--optim.lr": "learning rate",
        "--optim.name": "adamw or adamw8bit",
        "--optim.schedule": "learning rate over the run",
        "--optim.warmup-steps": "steps of the warm-up",
        "--ema.rates": "moving averages of the weights",
        "--seed": "seed of all random numbers",
    },
    "Machine": {
        "--performance.device": "auto, cuda or cpu",
        "--performance.precision": "fp32, bf16 or fp16",
        "--performance.recompute": "less memory, slower",
    },
    "Output": {
        "--output.folder": "run folder",
        "--output.checkpoint-every": "steps between checkpoints",
        "--output.sample-every": "steps between sample grids",
        "--output.report-to": "tensorboard, wandb, trackio",
    },
}
"""Flags by section; those without a placeholder are fields of the run, whose value is shown."""


def short_help(preset: str | None, default: RunConfig) -> str:
    """Return the short help.

    Args:
        preset: name of the preset, whose description comes first.
        default: the run that the flags change.
    """
    about = [inspect.getdoc(PRESETS[preset]) or ""] if preset in PRESETS else []
    lines = ["usage: fastdiff train --preset NAME [FLAGS]", *about, "The same command again resumes the run."]
    for title, flags in SHOWN.items():
        lines += ["", f"{title}:", *(_line(flag, text, default) for flag, text in flags.items())]
    presets = "" if preset else f"\nPresets:\n{listed_presets()}\n"
    return "\n".join([*lines, presets, "--help-all lists all flags with their full descriptions."])


def _line(flag: str, text: str, default: RunConfig) -> str:
    value = "" if " " in flag or flag == "--dry-run" else f" [{_value(flag, default)}]"
    return f"  {flag:<28}{text}{value}"


def _value(flag: str, default: RunConfig) -> Any:
    """Return the value of a field, ``-`` if this network or process has no such field or it is empty."""
    names = flag.removeprefix("--").replace("-", "_").split(".")
    value: Any = default
    for name in names:
        value = getattr(value, name, None)
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    return "-" if value in (None, "") else value
