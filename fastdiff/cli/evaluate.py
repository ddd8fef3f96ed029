"""``fastdiff evaluate``: quality metrics of a run, of a published file of weights, or of images."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from fastdiff.cli.published_weights import add_plugin, add_preset, parse_published
from fastdiff.config.arguments.types import (
    VECTORS,
    Subcommands,
    add_averages,
    count,
    finite,
    interval,
    local_path,
    picture,
    positive,
    seed,
    time_shift,
)
from fastdiff.config.local_paths import require_local
from fastdiff.config.sections.performance import Precision
from fastdiff.config.sections.sampler import Labels, SchedulerName
from fastdiff.console import show
from fastdiff.errors import ConfigError, require
from fastdiff.live_line import live_line
from fastdiff.outputs import require_output, write_output
from fastdiff.terminal import columns

if TYPE_CHECKING:
    from fastdiff.config.run import RunConfig
    from fastdiff.evaluation.image_comparison import ImageComparisonOptions

_OF_RUN = ("ema", "ema_std")
_OF_SOLVER = ("scheduler", "steps", "shift", "cfg_channels")
_OF_SWEEP = ("widths", "scales", "intervals", "few", "num", "labels", "precision", "autoencoder", "step")
_OF_NLL = ("samples", "data", "clip_denoised")
_OF_IMAGES = ("features", "metric", "out")
_OF_BOTH = ("batch", "seed")


def add(commands: Subcommands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "evaluate",
        help="measure the images of a run against real ones, or with --nll its likelihood",
        description="For a run: draws or enlarges digits and evaluates them; writes RUN/evaluation.json. With --nll: "
        "the bound on the negative log-likelihood of data, in bits per dimension, over all timesteps, in "
        "RUN/nll.json; its terms, with the errors of x0 and of the noise, by timestep in RUN/nll.npz; for FILE.pt in "
        "FILE.nll.json and FILE.nll.npz. With --reference: FID, KID, precision and recall of images. They are npz "
        "files with arr_0 uint8 [N, H, W, C] (fastdiff sample RUN --npz) or folders of images of one size; nothing is "
        "resized. With a run and --reference: draws its images and measures them, over --widths, --scales and "
        "--intervals if given; RUN/sweep.json says of each figure how it was made.",
    )
    parser.add_argument(
        "subject",
        type=local_path,
        metavar="RUN|FILE|SAMPLES",
        help="run folder, whose newest checkpoint is used; .pt or .safetensors file, with --preset and --nll; with "
        "--reference: npz file or folder of images",
    )
    add_preset(parser)
    add_plugin(parser)
    add_averages(parser)
    parser.add_argument("--batch", type=count, help="images, or samples times timesteps, per pass; default: 64")
    parser.add_argument("--seed", type=seed, help="seed of the noise, or of the KID subsets; default: 0")
    parser.add_argument("--nll", action="store_true", help="measure the likelihood")
    of_nll = parser.add_argument_group("with --nll")
    of_nll.add_argument("--samples", type=count, help="number of samples, spread evenly over the data; default: 1000")
    of_nll.add_argument("--data", metavar="PATH", help="folder of latent shards; default: the training data of the run")
    of_nll.add_argument(
        "--clip-denoised",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="clamp estimates of x0 to [-1, 1]; default: only for pixel-space models",
    )
    parser.add_argument(
        "--png", type=picture(*VECTORS), help="write a picture of the curves over timesteps, or of FID over the sweep"
    )
    parser.add_argument(
        "--reference",
        type=local_path,
        metavar="REAL",
        help="npz file or folder of real images to compare SAMPLES with; or npz file of their statistics mu and "
        "sigma, for FID only",
    )
    _add_comparison(parser)
    _add_sweep(parser)
    parser.set_defaults(run=_evaluate)


def _add_comparison(parser: argparse.ArgumentParser) -> None:
    of_images = parser.add_argument_group("with --reference")
    of_images.add_argument(
        "--features",
        metavar="NAME",
        help="inception (needs torch-fidelity and its weights), pixels, or PATH.py:FUNCTION, a function from uint8 "
        "[B, H, W, C] to [B, D]; this runs PATH.py. Default: inception",
    )
    of_images.add_argument(
        "--metric",
        action="append",
        metavar="PATH.py:FUNCTION",
        help="further metric, a function from the features [N, D] and [M, D] of both sets to a number; this runs "
        "PATH.py. May be given several times, also with the names of installed plug-ins",
    )
    of_images.add_argument("--out", type=local_path, metavar="JSON", help="also write the result to this file")


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "with --reference and a run",
        "Few images of each combination are measured first, then all of the best one. The same command resumes; "
        "torchrun --no-python -- draws on many GPUs.",
    )
    group.add_argument(
        "--widths", nargs="+", type=positive, metavar="STD", help="relative stds of power-function averages to compare"
    )
    group.add_argument("--scales", nargs="+", type=finite, metavar="S", help="guidance scales to compare; 1: none")
    group.add_argument(
        "--intervals",
        nargs="+",
        type=interval,
        metavar="LOW:HIGH",
        help="intervals of noise levels with guidance to compare, 0 is the data and 1 pure noise",
    )
    group.add_argument("--few", type=count, metavar="N", help="images of each combination; default: 5000")
    group.add_argument("--num", type=count, metavar="N", help="images of the best one; default: 50000")
    group.add_argument(
        "--labels", choices=get_args(Labels), help="classes drawn at random, or balanced: in turn; default: the run's"
    )
    group.add_argument("--scheduler", metavar="NAME", help=f"{', '.join(get_args(SchedulerName))}; default: the run's")
    group.add_argument("--steps", type=count, help="denoising steps; default: the run's --sampling.steps, or 50")
    group.add_argument(
        "--shift",
        type=time_shift,
        metavar="K",
        help="time shift towards noise with flow, or latent; default: the run's",
    )
    group.add_argument(
        "--cfg-channels", type=count, metavar="N", help="guide only the first N channels; default: the run's"
    )
    group.add_argument("--precision", choices=get_args(Precision), help="precision of the model; default: fp32")
    group.add_argument("--autoencoder", metavar="PATH_OR_ID", help="decoder of the latents; default: of the data")
    group.add_argument("--step", type=count, metavar="N", help="checkpoint of this step; default: the newest")


def _evaluate(arguments: argparse.Namespace) -> None:
    require_local("--features", arguments.features or "")
    if arguments.nll and arguments.reference:
        raise ConfigError("--nll evaluates a run and --reference images; give one of them")
    require_local("--autoencoder", arguments.autoencoder or "")
    is_network = arguments.preset is not None or (arguments.subject / "run.json").is_file()
    if arguments.reference and is_network:
        _refuse(arguments, _OF_NLL, "needs --nll")
        _sweep(arguments)
        return
    none = f": {arguments.subject} is no run, and no published file with --preset" if arguments.reference else ""
    _refuse(arguments, (*_OF_SWEEP, *_OF_SOLVER), f"needs a run and --reference{none}")
    if arguments.reference:
        _refuse(arguments, (*_OF_NLL, "png"), "needs --nll")
        _refuse(arguments, _OF_RUN, "applies to a network, and --reference evaluates images")
        require(not arguments.fields, f"{' '.join(arguments.fields[:1])} applies to a published file of weights")
        _evaluate_images(arguments)
        return
    _refuse(arguments, _OF_IMAGES, "needs --reference")
    if not arguments.nll:
        _refuse(arguments, (*_OF_NLL, "png"), "needs --nll")
        _refuse(arguments, _OF_BOTH, "needs --nll or --reference")
    published = parse_published(arguments.subject, arguments.preset, arguments.fields)
    if published is None:
        _require_run(arguments.subject)
    (_evaluate_nll if arguments.nll else _evaluate_digits)(arguments, published)


def _refuse(arguments: argparse.Namespace, names: Sequence[str], why: str) -> None:
    for name in names:
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} {why}")


def _require_run(subject: Path) -> None:
    from fastdiff.config.run_record import require_run

    try:
        require_run(subject)
    except ConfigError as error:
        raise ConfigError(f"{error}; to measure images, give real ones with --reference") from None


def _evaluate_digits(arguments: argparse.Namespace, published: RunConfig | None) -> None:
    if published is not None:
        raise ConfigError(
            f"{arguments.subject}: give --nll for its likelihood; to measure its images, draw them with `fastdiff "
            "sample --npz` and give real ones with --reference"
        )
    with live_line.during(f"loading {arguments.subject} ..."):
        from fastdiff.evaluation.digits import evaluate_run
        from fastdiff.sampling.run import Run

        run = Run(arguments.subject, ema=arguments.ema, ema_std=arguments.ema_std)
    print(json.dumps(evaluate_run(run)))


def _evaluate_images(arguments: argparse.Namespace) -> None:
    from fastdiff.evaluation.image_comparison import evaluate_images

    out = arguments.out
    _require_out(out)
    result = evaluate_images(arguments.subject, arguments.reference, _comparison_options(arguments))
    if out:
        write_output(out, json.dumps(result, indent=2).encode() + b"\n")
    print(json.dumps(result))


def _require_out(out: Path | None) -> None:
    if out:
        is_other = out.is_file() and out.suffix != ".json"
        require(not is_other, f"--out {out}: it exists and is no JSON by its name; name a new file, or one with .json")
        require_output(out)


def _comparison_options(arguments: argparse.Namespace) -> ImageComparisonOptions:
    from fastdiff.evaluation.image_comparison import ImageComparisonOptions

    return ImageComparisonOptions(
        **_given(arguments, "features", "batch", "seed"), metrics=tuple(arguments.metric or ())
    )


def _evaluate_nll(arguments: argparse.Namespace, published: RunConfig | None) -> None:
    from fastdiff.evaluation.figures import require_matplotlib
    from fastdiff.evaluation.likelihood import NllOptions, draw, evaluate_nll
    from fastdiff.sampling.run import Run

    if arguments.png:
        require_matplotlib()
        require_output(arguments.png)
    options = NllOptions(**_given(arguments, "samples", "data", "batch", "seed"), clip=arguments.clip_denoised)
    with live_line.during(f"loading {arguments.subject} ..."):
        run = Run(arguments.subject, ema=arguments.ema, ema_std=arguments.ema_std, published=published)
    result, found = evaluate_nll(run, options, progress=True)
    show(
        f"{run.result('nll.json')}: {result['total_bpd']:.4f} ± {result['total_bpd_se']:.4f} bits per "
        f"dimension ({result['prior_bpd']:.1e} of them from the prior), {result['samples']} samples; {run.description}"
    )
    if arguments.png:
        draw(arguments.png, found)
        show(f"drawn: {arguments.png}")


def _sweep(arguments: argparse.Namespace) -> None:
    from fastdiff.evaluation.figures import require_matplotlib
    from fastdiff.evaluation.image_comparison import Comparison
    from fastdiff.evaluation.sweep import Sweep, SweepOptions
    from fastdiff.evaluation.sweep_figures import as_table, draw
    from fastdiff.parallel.launcher import place_in_any_job

    for name in ("ema", "ema_std"):
        flag = f"--{name.replace('_', '-')} {getattr(arguments, name)}"
        one = arguments.widths is None or getattr(arguments, name) is None
        require(one, f"{flag} with --widths, which are the averages to compare; leave one of them out")
    published = parse_published(arguments.subject, arguments.preset, arguments.fields)
    if arguments.png:
        require_matplotlib()
        require_output(arguments.png)
    _require_out(arguments.out)
    lists = _given(arguments, "widths", "scales", "intervals")
    single = _given(arguments, "few", "num", "labels", "precision", "autoencoder", "step", "batch", "ema", "ema_std")
    compared: dict[str, Any] = {name: tuple(values) for name, values in lists.items()}
    options = SweepOptions(**compared, **single, sampler=_given(arguments, *_OF_SOLVER, "seed"))
    place = place_in_any_job()
    comparison = Comparison(arguments.reference, _comparison_options(arguments))
    sweep = Sweep(arguments.subject, arguments.reference, comparison, options, place, published)
    *few, best = sweep.rows()
    if place.rank:
        return
    show(as_table([*few, best], room=columns(sys.stdout)))
    if arguments.png:
        draw(arguments.png, few or [best], best)
        show(f"drawn: {arguments.png}")
    if arguments.out:
        write_output(arguments.out, json.dumps(best, indent=2).encode() + b"\n")
    show(f"{sweep.record}: how each figure was made")


def _given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the options that have a value; the rest keep their defaults."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}
