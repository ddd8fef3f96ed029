"""``fastdiff export``: a run, or a published file of weights, in the formats of other programs."""

import argparse

from fastdiff.cli.published_weights import add_plugin, add_preset, parse_published
from fastdiff.config.arguments.types import Subcommands, add_averages, count, local_path
from fastdiff.console import show
from fastdiff.errors import require
from fastdiff.live_line import live_line


def add(commands: Subcommands) -> None:
    """Register the command."""
    parser = commands.add_parser("export", help="write a run in the format of another program")
    parser.add_argument(
        "run_folder",
        type=local_path,
        metavar="RUN|FILE",
        help="run folder (its newest checkpoint), or .pt or .safetensors file",
    )
    parser.add_argument("out", type=local_path, metavar="OUT", help="folder to write")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an earlier export in OUT, when the new one is complete; without it OUT must be new or empty",
    )
    parser.add_argument(
        "--format",
        metavar="FORMAT",
        required=True,
        help="diffusers: a pipeline, or the network alone (a DiT needs two lines of code after loading, see "
        "OUT/README.md); single-file: a checkpoint of the original Stable Diffusion, for ComfyUI and AUTOMATIC1111; "
        "lora: an adapter that ComfyUI and diffusers read; lora-diffusers, lora-native, lora-kohya: under the names of "
        "diffusers, of the original checkpoint, or of kohya's scripts; dit: weights for the published DiT, dit.pt; "
        "dit-training: its full training state, NNNNNNN.pt; iddpm: the full training state of improved-diffusion, "
        "model*.pt, ema_*.pt and opt*.pt; safetensors: the weights alone. All except those of an adapter merge it into "
        "its base",
    )
    add_preset(parser)
    add_plugin(parser)
    which = add_averages(parser)
    which.add_argument("--raw", action="store_true", help="export the raw weights instead of an average")
    parser.add_argument(
        "--dtype", choices=("fp32", "fp16", "bf16"), default="fp32", help="dtype of the exported weights"
    )
    parser.add_argument(
        "--step", type=count, metavar="N", help="export an earlier checkpoint, or with --ema-std a snapshot"
    )
    parser.add_argument(
        "--push-to-hub",
        metavar="REPO_ID",
        help="upload OUT to the Hugging Face hub; in an existing repository it replaces files of the same names, which "
        "stay in the history",
    )
    parser.add_argument("--private", action="store_true", help="create a private repository on the hub")
    parser.set_defaults(run=_export)


def _export(arguments: argparse.Namespace) -> None:
    from fastdiff.export.hub import check_repo_id, push
    from fastdiff.export.run import Choice, export

    require(not arguments.private or arguments.push_to_hub is not None, "--private needs --push-to-hub")
    if arguments.push_to_hub is not None:
        check_repo_id(arguments.push_to_hub)
    published = parse_published(arguments.run_folder, arguments.preset, arguments.fields)
    choice = Choice(
        format=arguments.format,
        ema=arguments.ema,
        ema_std=arguments.ema_std,
        raw=arguments.raw,
        dtype=arguments.dtype,
        step=arguments.step,
    )
    with live_line.during(f"exporting {arguments.run_folder} ..."):
        export(
            arguments.run_folder,
            arguments.out,
            choice,
            published=published,
            repo_id=arguments.push_to_hub,
            overwrite=arguments.overwrite,
        )
    show(f"{arguments.out} is written, in the format {arguments.format}; its README.md says how to load it")
    if arguments.push_to_hub is not None:
        show(push(arguments.out, arguments.push_to_hub, private=arguments.private))
