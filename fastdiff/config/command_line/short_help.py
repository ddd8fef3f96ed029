"""The short help of the trainer: the flags that people turn, with the values of the preset."""

import inspect
from collections.abc import Iterator, Mapping
from shutil import get_terminal_size
from typing import Any

from fastdiff.config.arguments.help_format import wrapped
from fastdiff.config.presets import PRESETS, described_presets
from fastdiff.config.run import RunConfig
from fastdiff.terminal import fitted

_NARROWEST = 20
_BEGIN = 30
"""Column of the texts about flags."""

SHOWN: dict[str, dict[str, str]] = {
    "Start": {
        "--preset NAME": "a complete run; further flags change its fields",
        "--config FILE": "YAML or JSON with fields, or a run.json",
        "--ranks K": "processes; default: one per visible GPU",
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
        "--batch.micro": "samples per rank and pass; auto: what fits",
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
        "--optim.name": "adamw, adamw8bit or another",
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
"""Flags by section; those of fields of the run are shown with their values."""


def short_help(preset: str | None, default: RunConfig) -> str:
    """Return the short help, in the width of the terminal."""
    room = get_terminal_size().columns
    about = [inspect.getdoc(PRESETS[preset]) or ""] if preset in PRESETS else []
    lines = ["usage: fastdiff train --preset NAME [FLAGS]", *about, "The same command again resumes the run."]
    for title, flags in SHOWN.items():
        rows = {flag: text + _value(flag, default) for flag, text in flags.items()}
        lines += ["", f"{title}:", *_table(rows, room, _BEGIN)]
    if not preset:
        about_presets = described_presets()
        lines += ["", "Presets:", *_table(about_presets, room, max(map(len, about_presets)) + 4)]
    return fitted("\n".join([*lines, "", "--help-all lists all flags with their full descriptions."]), room)


def _table(rows: Mapping[str, str], room: int, begin: int) -> Iterator[str]:
    """Yield lines with names on the left and texts, wrapped, from column ``begin`` on."""
    for name, text in rows.items():
        first, *others = wrapped(text, max(room - begin, _NARROWEST))
        yield f"  {name:<{begin - 2}}{first}"
        yield from (" " * begin + other for other in others)


def _value(flag: str, default: RunConfig) -> str:
    """Return the value of a field, in brackets; nothing for one that is empty, or that this run does not have."""
    value: Any = default
    for name in flag.removeprefix("--").replace("-", "_").split("."):
        value = getattr(value, name, None)
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    return "" if value in (None, "") else f" [{value}]"
