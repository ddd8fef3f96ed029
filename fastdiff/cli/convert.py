"""``fastdiff convert``: a published autoencoder in the layout of diffusers."""

import argparse

from fastdiff.config.arguments.types import Subcommands, local_path, positive
from fastdiff.live_line import live_line


def add(commands: Subcommands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "convert",
        help="write a published autoencoder, such as VA-VAE, in the layout of diffusers",
        description="Convert an autoencoder with the names of latent diffusion (VA-VAE, REPA-E) to the layout of "
        "diffusers, for `fastdiff encode --pretrained OUT`.",
    )
    parser.add_argument("file", type=local_path, metavar="FILE", help=".pt, .ckpt or .safetensors")
    parser.add_argument("out", type=local_path, metavar="OUT", help="folder to write; must be new or empty")
    known = parser.add_mutually_exclusive_group()
    known.add_argument(
        "--scale",
        type=positive,
        metavar="F",
        help="factor of its latents, which become x0: 0.3099 for REPA-E's e2e-invae in SR-DiT",
    )
    known.add_argument(
        "--statistics",
        metavar="PATH",
        help="file with mean and std of its latents per channel (latents_stats.pt), or a data set that measured them; "
        "without both `fastdiff encode` measures them",
    )
    parser.set_defaults(run=_convert)


def _convert(arguments: argparse.Namespace) -> None:
    with live_line.during("importing torch ..."):
        from fastdiff.export.ldm_autoencoder import convert_autoencoder

    convert_autoencoder(arguments.file, arguments.out, arguments.statistics, arguments.scale)
