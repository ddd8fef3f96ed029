"""``fastdiff sample`` and ``fastdiff evaluate``: what a run has learned."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fastdiff.commands.arguments import Subcommands, classes, count


def add(commands: Subcommands) -> None:
    """Register the commands."""
    sample = commands.add_parser("sample", help="draw images from a run")
    sample.add_argument("folder", type=Path, metavar="RUN", help="run folder; its newest checkpoint is used")
    sample.add_argument("--scheduler", default="ddim", help="ddim, dpmsolver++ or ddpm")
    sample.add_argument("--steps", type=count, default=50, help="denoising steps")
    sample.add_argument("--cfg", type=float, default=1.5, help="classifier-free guidance scale; 1: none")
    sample.add_argument("--classes", type=classes, default=None, metavar="0-9", help="classes, as 0-9 or 1,5,7")
    sample.add_argument("--per-class", type=count, default=8, help="images per class")
    sample.add_argument("--ema", type=float, default=None, metavar="RATE", help="which average; default: the first")
    sample.add_argument("--seed", type=int, default=0)
    sample.add_argument("--grid", type=Path, default=Path("grid.png"), metavar="PNG", help="picture to write")
    sample.set_defaults(run=_sample)

    evaluate = commands.add_parser("evaluate", help="measure the images of a run against the real ones")
    evaluate.add_argument("folder", type=Path, metavar="RUN")
    evaluate.set_defaults(run=_evaluate)


def _sample(arguments: argparse.Namespace) -> None:
    from fastdiff.trained import TrainedRun

    run = TrainedRun(arguments.folder, ema=arguments.ema)
    run.draw_grid(
        arguments.grid,
        classes=arguments.classes,
        per_class=arguments.per_class,
        scheduler=arguments.scheduler,
        steps=arguments.steps,
        cfg=arguments.cfg,
        seed=arguments.seed,
    )
    print(f"{arguments.grid}: {run.description}")


def _evaluate(arguments: argparse.Namespace) -> None:
    from fastdiff.trained import TrainedRun

    print(json.dumps(TrainedRun(arguments.folder).evaluate()))
