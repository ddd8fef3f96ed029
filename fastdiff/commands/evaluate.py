"""``fastdiff evaluate``: how good what a run has learned is, in numbers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fastdiff.commands.arguments import Subcommands, add_averages, count
from fastdiff.errors import ConfigError

_OF_NLL = ("samples", "data", "clip_denoised", "batch", "seed", "png")


def add(commands: Subcommands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "evaluate",
        help="measure the images of a run against the real ones, or with --nll its likelihood",
        description="Without --nll: draws digits and judges them, into RUN/evaluation.json. With --nll: the bound on "
        "the negative log-likelihood of data, in bits per dimension, over all timesteps, into RUN/nll.json; its terms, "
        "with the errors of x0 and of the noise, by timestep into RUN/nll.npz.",
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="run folder; its newest checkpoint is used")
    add_averages(parser)
    parser.add_argument("--nll", action="store_true", help="measure the likelihood")
    of_nll = parser.add_argument_group("with --nll")
    of_nll.add_argument("--samples", type=count, help="samples, spread evenly over the data; default: 1000")
    of_nll.add_argument("--data", metavar="PATH", help="folder of latent shards; default: what the run was trained on")
    of_nll.add_argument("--clip-denoised", action="store_true", help="clamp estimates of x0 to [-1, 1], for pixels")
    of_nll.add_argument("--batch", type=count, help="samples times timesteps in a forward pass; default: 64")
    of_nll.add_argument("--seed", type=int, help="of the noise; default: 0")
    of_nll.add_argument("--png", type=Path, help="picture of the curves by timestep to write")
    parser.set_defaults(run=_evaluate)


def _evaluate(arguments: argparse.Namespace) -> None:
    if arguments.nll:
        _evaluate_nll(arguments)
        return
    for name in _OF_NLL:
        if getattr(arguments, name) not in (None, False):
            raise ConfigError(f"--{name.replace('_', '-')} needs --nll")
    from fastdiff.trained import TrainedRun

    print(json.dumps(TrainedRun(arguments.folder, ema=arguments.ema, ema_std=arguments.ema_std).evaluate()))


def _evaluate_nll(arguments: argparse.Namespace) -> None:
    from fastdiff.nll import NllOptions, evaluate_nll
    from fastdiff.nll_figure import draw, require_matplotlib
    from fastdiff.trained import TrainedRun

    if arguments.png:
        require_matplotlib()
    given = {name: getattr(arguments, name) for name in ("samples", "data", "batch", "seed")}
    options = {name: value for name, value in given.items() if value is not None}
    run = TrainedRun(arguments.folder, ema=arguments.ema, ema_std=arguments.ema_std)
    result, found = evaluate_nll(run, NllOptions(**options, clip=arguments.clip_denoised), progress=True)
    print(
        f"{arguments.folder / 'nll.json'}: {result['total_bpd']:.4f} ± {result['total_bpd_se']:.4f} bits per dimension "
        f"({result['prior_bpd']:.1e} of it the prior's), {result['samples']} samples; {run.description}"
    )
    if arguments.png:
        draw(arguments.png, found)
        print(f"drawn: {arguments.png}")
