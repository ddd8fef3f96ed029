"""``fastdiff sample``: images from what a run has learned."""

from __future__ import annotations

import argparse
from pathlib import Path

from fastdiff.commands.arguments import Subcommands, add_averages, classes, count, finite
from fastdiff.errors import ConfigError


def add(commands: Subcommands) -> None:
    """Register the command."""
    sample = commands.add_parser("sample", help="draw images from a run")
    sample.add_argument("folder", type=Path, metavar="RUN", help="run folder; its newest checkpoint is used")
    sample.add_argument("--scheduler", default="ddim", help="ddim, dpmsolver++ or ddpm")
    levels = sample.add_mutually_exclusive_group()
    levels.add_argument("--steps", type=count, default=50, help="denoising steps, evenly spaced")
    levels.add_argument(
        "--respacing", default=None, metavar="TEXT", help="steps as in improved-diffusion: 250, 10,15,20 or ddim50"
    )
    sample.add_argument(
        "--cfg", type=finite, default=None, help="classifier-free guidance scale, 1: none; default: 1.5, prompts 7.5"
    )
    sample.add_argument("--classes", type=classes, default=None, metavar="0-9", help="classes, as 0-9 or 1,5,7")
    sample.add_argument("--per-class", type=count, default=None, help="images per class; default: 8")
    sample.add_argument("--prompt", action="append", metavar="TEXT", help="what to draw; may be given several times")
    sample.add_argument("--negative-prompt", default=None, metavar="TEXT", help="what not to draw")
    sample.add_argument("--per-prompt", type=count, default=None, help="images per prompt; default: 4")
    add_averages(sample)
    sample.add_argument("--seed", type=int, default=0)
    sample.add_argument("--grid", type=Path, default=Path("grid.png"), metavar="PNG", help="picture to write")
    sample.set_defaults(run=_sample)


def _sample(arguments: argparse.Namespace) -> None:
    from fastdiff.trained import Drawing, TrainedRun

    of_prompts = arguments.negative_prompt, arguments.per_prompt
    of_classes = arguments.classes, arguments.per_class
    if arguments.prompt and of_classes != (None, None):
        raise ConfigError("--classes and --per-class are for models of classes, --prompt is for models of text")
    if not arguments.prompt and of_prompts != (None, None):
        raise ConfigError("--negative-prompt and --per-prompt need --prompt")
    run = TrainedRun(arguments.folder, ema=arguments.ema, ema_std=arguments.ema_std)
    drawing = Drawing(
        scheduler=arguments.scheduler,
        steps=arguments.steps,
        respacing=arguments.respacing,
        cfg=arguments.cfg,
        seed=arguments.seed,
    )
    if arguments.prompt:
        run.draw_prompts(
            arguments.grid,
            arguments.prompt,
            negative=arguments.negative_prompt,
            per_prompt=arguments.per_prompt or 4,
            drawing=drawing,
        )
    else:
        run.draw_classes(arguments.grid, arguments.classes, per_class=arguments.per_class or 8, drawing=drawing)
    print(f"{arguments.grid}: {run.description}")
