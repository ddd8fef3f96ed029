"""``fastdiff evaluate``: quality metrics of a run, of a published file of weights, or of images."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdiff.cli.published_weights import add_plugin, add_preset, parse_published
from fastdiff.config.arguments.types import VECTORS, Subcommands, add_averages, count, local_path, picture, seed
from fastdiff.config.local_paths import require_local
from fastdiff.console import show
from fastdiff.errors import ConfigError, require
from fastdiff.live_line import live_line
from fastdiff.outputs import require_output, write_output

if TYPE_CHECKING:
    from fastdiff.config.run import RunConfig

_OF_RUN = ("ema", "ema_std", "preset")
_OF_NLL = ("samples", "data", "clip_denoised", "png")
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
        "resized.",
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
    of_nll.add_argument("--png", type=picture(*VECTORS), help="write a picture of the curves over timesteps")
    parser.add_argument(
        "--reference",
        type=local_path,
        metavar="REAL",
        help="npz file or folder of real images to compare SAMPLES with; or npz file of their statistics mu and "
        "sigma, for FID only",
    )
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
    parser.set_defaults(run=_evaluate)


def _evaluate(arguments: argparse.Namespace) -> None:
    require_local("--features", arguments.features or "")
    if arguments.nll and arguments.reference:
        raise ConfigError("--nll evaluates a run and --reference images; give one of them")
    if arguments.reference:
        _refuse(arguments, _OF_NLL, "needs --nll")
        _refuse(arguments, _OF_RUN, "applies to a network, and --reference evaluates images")
        require(not arguments.fields, f"{' '.join(arguments.fields[:1])} applies to a published file of weights")
        _evaluate_images(arguments)
        return
    _refuse(arguments, _OF_IMAGES, "needs --reference")
    if not arguments.nll:
        _refuse(arguments, _OF_NLL, "needs --nll")
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
    from fastdiff.evaluation.image_comparison import ImageComparisonOptions, evaluate_images

    out = arguments.out
    if out:
        is_other = out.is_file() and out.suffix != ".json"
        require(not is_other, f"--out {out}: it exists and is no JSON by its name; name a new file, or one with .json")
        require_output(out)
    options = ImageComparisonOptions(
        **_given(arguments, "features", "batch", "seed"), metrics=tuple(arguments.metric or ())
    )
    result = evaluate_images(arguments.subject, arguments.reference, options)
    if out:
        write_output(out, json.dumps(result, indent=2).encode() + b"\n")
    print(json.dumps(result))


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


def _given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the options that have a value; the rest keep their defaults."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}
