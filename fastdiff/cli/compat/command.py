"""``fastdiff compat``: translation of another training script's command line."""

import argparse
import sys

from fastdiff.config.arguments.types import Subcommands, count
from fastdiff.terminal import columns


def add(commands: Subcommands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "compat",
        help="translate the flags of another training script",
        usage="fastdiff compat [--gpus N] {t2i,t2i-lora,dit,iddpm,iddpm-sr} -- FLAGS",
        description="Prints the fastdiff commands equivalent to the other script with these flags, and lists the "
        "differences. t2i: diffusers' train_text_to_image.py; t2i-lora: its train_text_to_image_lora.py; dit: "
        "facebookresearch/DiT's train.py; iddpm: openai/improved-diffusion's image_train.py; iddpm-sr: its "
        "super_res_train.py.",
    )
    parser.add_argument("--gpus", type=count, default=1, help="number of processes of the other script")
    parser.add_argument("script", choices=("t2i", "t2i-lora", "dit", "iddpm", "iddpm-sr"))
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="-- FLAGS", help="its flags, unchanged")
    parser.set_defaults(run=_compat)


def _compat(arguments: argparse.Namespace) -> None:
    from fastdiff.cli.compat.run import in_words, translate

    flags = arguments.flags[1:] if arguments.flags[:1] == ["--"] else arguments.flags
    print(in_words(translate(arguments.script, flags, gpus=arguments.gpus), columns(sys.stdout)))
