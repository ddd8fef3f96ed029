"""``fastdiff compare``: the difference between the validation losses of two runs, by noise level."""

from __future__ import annotations

import argparse

from fastdiff.config.argument_types import VECTORS, Subcommands, count, local_path, picture


def add(commands: Subcommands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "compare",
        help="compare the validation losses of two runs",
        description="Prints and draws the difference between the losses of two runs, by bin of the log SNR, with its "
        "standard error. Both must have been trained with the same --validation.data and --validation.samples.",
    )
    parser.add_argument("a", type=local_path, metavar="RUN_A", help="run folder")
    parser.add_argument("b", type=local_path, metavar="RUN_B", help="run folder to compare with RUN_A")
    parser.add_argument(
        "--step", type=count, default=None, metavar="N", help="step to compare; default: the newest of both runs"
    )
    parser.add_argument(
        "--png", type=picture(*VECTORS), default=None, help="picture to write; default: RUN_B/compare-RUN_A.png"
    )
    parser.set_defaults(run=_compare)


def _compare(arguments: argparse.Namespace) -> None:
    from fastdiff.evaluation.comparison import compare, draw, read_both, table

    found = compare(*read_both(arguments.a, arguments.b, arguments.step))
    print(table(found))
    path = arguments.png or arguments.b / f"compare-{arguments.a.resolve().name}.png"
    draw(found, path)
    print(f"drawn: {path}")
