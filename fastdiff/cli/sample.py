"""``fastdiff sample``: images drawn from a trained run or from a published file of weights."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from fastdiff.cli.published_weights import add_plugin, add_preset, parse_published
from fastdiff.config.arguments.types import (
    Subcommands,
    add_averages,
    count,
    finite,
    local_path,
    picture,
    seed,
    time_shift,
)
from fastdiff.config.local_paths import require_local
from fastdiff.config.sections.sampler import Labels, SamplerConfig, SchedulerName
from fastdiff.console import show
from fastdiff.errors import ConfigError
from fastdiff.live_line import live_line
from fastdiff.outputs import require_output

if TYPE_CHECKING:
    import torch

    from fastdiff.config.run import RunConfig
    from fastdiff.sampling.run import Run

_USUAL = SamplerConfig()
_OF_SOLVER = (
    "scheduler",
    "steps",
    "respacing",
    "shift",
    "cfg",
    "cfg_channels",
    "cfg_interval",
    "clip",
    "coupled_noise",
    "seed",
)
_OF_SETS = "num", "labels", "low_res", "batch", "precision", "autoencoder", "overwrite"


def add(commands: Subcommands) -> None:
    """Register the command."""
    sample = commands.add_parser(
        "sample",
        help="draw images from a run, or from a published file of weights",
        description="Draw images from a run or a published file: a few as a picture (--grid), or any number as an npz "
        "(--npz) or as single files (--pngs). For the latter two, run it on many GPUs with torchrun --no-python --, "
        "deepspeed --no_python --no_local_rank --, or srun: the files are the same for any number of GPUs, and after a "
        "kill the same command resumes.",
    )
    sample.add_argument("folder", type=local_path, metavar="RUN|FILE", help="run folder, or .pt or .safetensors file")
    add_preset(sample)
    add_plugin(sample)
    _add_solver(sample)
    _add_content(sample)
    add_averages(sample)
    sample.add_argument("--step", type=count, metavar="N", help="checkpoint of this step; default: the newest")
    sample.add_argument(
        "--seed", type=seed, default=_USUAL.seed, help="seed of the noise and of drawn classes; default: 0"
    )
    where = sample.add_mutually_exclusive_group()
    where.add_argument("--grid", type=picture(), metavar="PNG", help="picture to write; default: grid.png")
    where.add_argument(
        "--npz", type=local_path, help="file to write: arr_0 uint8 [N, H, W, C], and arr_1 if there are classes"
    )
    where.add_argument(
        "--pngs",
        type=local_path,
        metavar="FOLDER",
        help="folder to write one PNG per image to, named by number and class or prompt: 000012-flower.png",
    )
    sample.add_argument(
        "--overwrite",
        action="store_true",
        default=None,
        help="replace a finished set of --npz or --pngs that was drawn with other options; without it that is refused",
    )
    _add_set(sample)
    sample.set_defaults(run=_sample)


def _add_solver(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scheduler",
        metavar="NAME",
        help=f"{', '.join(get_args(SchedulerName))}; default: the run's --sampling.scheduler, or {_USUAL.scheduler}",
    )
    levels = parser.add_mutually_exclusive_group()
    levels.add_argument(
        "--steps",
        type=count,
        help=f"denoising steps, evenly spaced; default: the run's --sampling.steps, or {_USUAL.steps}",
    )
    levels.add_argument("--respacing", metavar="TEXT", help="steps as in improved-diffusion: 250, 10,15,20 or ddim50")
    parser.add_argument(
        "--shift",
        type=time_shift,
        metavar="K",
        help="time shift towards noise with flow; latent: from the size of the latents; default: the run's "
        "--sampling.shift, or that of the training",
    )
    parser.add_argument(
        "--cfg",
        type=finite,
        help="classifier-free guidance scale, 1: none; default: the run's --sampling.cfg, or 1.5, for prompts 7.5. A "
        "run that dropped no classes in training allows only 1, its default, unless it had --pretrained.weights",
    )
    parser.add_argument(
        "--cfg-channels",
        type=count,
        metavar="N",
        help="guide only the first N channels of the prediction, as DiT's published code does with 3; needs guidance; "
        "default: the run's --sampling.cfg_channels, or all. A learned variance is not guided",
    )
    parser.add_argument(
        "--cfg-interval",
        nargs=2,
        type=finite,
        metavar=("LOW", "HIGH"),
        help="guide only the noise levels from LOW to HIGH, 0 is the data and 1 pure noise; needs guidance; default: "
        "the run's --sampling.cfg_interval, or all",
    )
    parser.add_argument(
        "--clip-denoised",
        dest="clip",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="clamp every estimate of the image to [-1, 1]; default: only for pixel-space models",
    )
    parser.add_argument(
        "--coupled-noise",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="begin the class token of a teacher at the mean of the noise of the latents; default: the run's "
        "--sampling.coupled_noise, off unless set",
    )


def _add_content(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--classes", metavar="NAMES", help="classes by name or number: flower,temple or 0-9; default: all"
    )
    parser.add_argument("--per-class", type=count, help="images per class; default: 8")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="text prompt; may be given several times")
    parser.add_argument("--negative-prompt", metavar="TEXT", help="negative text prompt")
    parser.add_argument("--per-prompt", type=count, help="images per prompt; default: 4")
    parser.add_argument(
        "--reference",
        action="append",
        type=local_path,
        metavar="FILE",
        help="picture that the prompts refer to, for edit models; given as often as each had references in training",
    )
    parser.add_argument(
        "--beside-base",
        action="store_true",
        default=None,
        help="with --grid, of a fine-tuned network: the images of the network that it started from, from the same "
        "noise, beside its own, under the prompts",
    )


def _add_set(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("npz and pngs")
    group.add_argument(
        "--num", type=count, metavar="N", help="number of images; the class of each is drawn from --classes"
    )
    group.add_argument(
        "--labels",
        choices=get_args(Labels),
        help="with --num: classes drawn at random, or balanced: in turn; default: the run's --sampling.labels, random "
        "unless set",
    )
    group.add_argument("--low-res", type=local_path, metavar="NPZ", help="images to enlarge (super-resolution)")
    group.add_argument("--batch", type=count, help="images per pass; default: 64; another value changes rounding")
    group.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        help="precision of the model; default: fp32; bf16 is several times faster on a GPU",
    )
    group.add_argument(
        "--autoencoder",
        metavar="PATH_OR_ID",
        help="decoder of the latents: a pipeline, an autoencoder, or identity for pixels; default: the autoencoder of "
        "the training data",
    )


def _sample(arguments: argparse.Namespace) -> None:
    _check(arguments)
    published = parse_published(arguments.folder, arguments.preset, arguments.fields)
    given = {name: value for name in _OF_SOLVER if (value := getattr(arguments, name)) is not None}
    if "cfg_interval" in given:
        given["cfg_interval"] = tuple(given["cfg_interval"])
    SamplerConfig(**given)  # a wrong value is told before anything is loaded
    if arguments.npz is not None or arguments.pngs is not None:
        _draw_set(arguments, given, published)
        return
    run = _load(arguments, published)
    sampler = run.sampler(**given)
    grid = arguments.grid or Path("grid.png")
    require_output(grid)
    columns = ""
    if arguments.prompt:
        run.draw_prompts(
            grid,
            arguments.prompt,
            negative=arguments.negative_prompt,
            per_prompt=arguments.per_prompt or 4,
            references=arguments.reference or (),
            sampler=sampler,
            beside_base=bool(arguments.beside_base),
        )
    else:
        titles = run.draw_classes(grid, arguments.classes, per_class=arguments.per_class or 8, sampler=sampler)
        columns = f"; columns: {', '.join(titles)}" if titles else ""
    show(f"{grid}: {run.description}{columns}")


def _load(arguments: argparse.Namespace, published: RunConfig | None, device: torch.device | None = None) -> Run:
    with live_line.during(f"loading {arguments.folder} ..."):
        from fastdiff.sampling.run import Run

        return Run(
            arguments.folder,
            ema=arguments.ema,
            ema_std=arguments.ema_std,
            step=arguments.step,
            device=device,
            published=published,
        )


def _check(arguments: argparse.Namespace) -> None:
    """Refuse options that contradict one another; the model itself checks which options it supports."""
    require_local("--autoencoder", arguments.autoencoder or "")
    of_prompts = arguments.negative_prompt, arguments.per_prompt, arguments.reference
    of_classes = arguments.classes, arguments.per_class
    if arguments.prompt and of_classes != (None, None):
        raise ConfigError("--classes and --per-class are for models of classes, --prompt is for models of text")
    if not arguments.prompt and of_prompts != (None, None, None):
        raise ConfigError("--negative-prompt, --per-prompt and --reference need --prompt")
    if not arguments.prompt and arguments.beside_base:
        raise ConfigError("--beside-base needs --prompt")
    flag = next((f"--{name}" for name in ("npz", "pngs") if getattr(arguments, name) is not None), None)
    if flag is not None and arguments.beside_base:
        raise ConfigError(f"--beside-base is for a picture, --grid PNG, not {flag}; leave out one of them")
    for name in _OF_SETS:
        if flag is None and getattr(arguments, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is for --npz FILE or --pngs FOLDER; give one of them")
    asked = arguments.num, *of_classes, arguments.prompt, arguments.low_res
    if flag is not None and not any(value is not None for value in asked):
        raise ConfigError(f"{flag}: give the number of images by --num, --per-class, --prompt or --low-res")


def _draw_set(arguments: argparse.Namespace, given: dict[str, Any], published: RunConfig | None) -> None:
    from fastdiff.data.encoding.options import device_of
    from fastdiff.parallel.launcher import place_in_any_job
    from fastdiff.sampling.conditions import SampleRequest
    from fastdiff.sampling.sample_set import SetOptions, draw_set

    place = place_in_any_job()
    run = _load(arguments, published, device_of(place))
    request = SampleRequest(
        num=arguments.num,
        classes=arguments.classes,
        per_class=arguments.per_class,
        labels=arguments.labels,
        prompts=arguments.prompt or (),
        negative=arguments.negative_prompt,
        per_prompt=arguments.per_prompt or 4,
        references=arguments.reference or (),
        low_res=arguments.low_res,
    )
    names = "batch", "precision", "autoencoder", "overwrite"
    options = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    out = arguments.npz or arguments.pngs
    draw_set(run, request, run.sampler(**given), SetOptions(out=out, pngs=arguments.npz is None, **options), place)
