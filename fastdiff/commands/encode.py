"""``fastdiff encode``: write latent shards."""

from __future__ import annotations

import argparse
from pathlib import Path

from fastdiff.commands.arguments import Subcommands, count, shape


def add(commands: Subcommands) -> None:
    """Register the command."""
    parser = commands.add_parser("encode", help="write latent shards")
    parser.add_argument("source", choices=("digits", "synthetic"), help="digits: scikit-learn's 1,797 real scans")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; must not hold a data set yet")
    parser.add_argument("--shape", type=shape, default=(4, 32, 32), metavar="C,H,W", help="synthetic: latent shape")
    parser.add_argument("--samples", type=count, default=10_000, help="synthetic: number of samples")
    parser.add_argument("--classes", type=count, default=1000, help="synthetic: number of classes")
    parser.set_defaults(run=_encode)


def _encode(arguments: argparse.Namespace) -> None:
    from fastdiff.data.encode import encode_digits, encode_synthetic

    if arguments.source == "digits":
        encode_digits(arguments.out)
    else:
        encode_synthetic(arguments.out, arguments.shape, arguments.samples, classes=arguments.classes)
