"""``fastdiff reference`` and ``fastdiff conform``: is a run like those of its recipe?"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fastdiff.cli.published_weights import add_plugin
from fastdiff.config.arguments.types import Parser, Subcommands, local_path
from fastdiff.console import show
from fastdiff.errors import ConfigError, FastdiffError, require
from fastdiff.outputs import require_output, write_output
from fastdiff.terminal import columns

if TYPE_CHECKING:
    from fastdiff.evaluation.conformance.comparison import Conformance
    from fastdiff.evaluation.conformance.reference import Reference


def add(commands: Subcommands) -> None:
    """Register the commands."""
    reference: Parser = commands.add_parser(
        "reference",
        help="make the reference of a recipe from runs of it",
        description="Writes what runs of a recipe have in common, for `fastdiff conform` to compare others with.",
    )
    targets = reference.add_subparsers(required=True, metavar="ACTION")
    make = targets.add_parser(
        "make",
        help="write losses by noise level, gradient norms and statistics at a series of steps",
        description="Writes losses by noise level with standard errors, gradient norms, and statistics of latents, "
        "conditions, targets and weights at a series of steps. Several runs, which differ in --seed, give the spread "
        "between runs; without it only the losses and the statistics of the data are compared.",
    )
    make.add_argument("runs", type=local_path, nargs="+", metavar="RUN", help="run folder")
    make.add_argument("out", type=local_path, metavar="OUT.json", help="file to write")
    add_plugin(make)
    make.set_defaults(run=_make)
    _add_conform(commands)


def _add_conform(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "conform",
        help="compare a run with the reference of its recipe, and name likely causes of a deviation",
        description="Says whether a run is as its recipe, within two sigma, or which noise levels and statistics "
        "deviate since which step, and the likely causes. The exit code is 0 for a run that conforms, 70 for one that "
        "deviates, 2 where nothing can be compared.",
    )
    parser.add_argument("folder", type=local_path, metavar="RUN", help="run folder, also of a run that goes on")
    parser.add_argument(
        "reference",
        metavar="REFERENCE",
        help="file of `fastdiff reference make`, preset that has one, or .csv with the columns step and loss",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_plugin(parser)
    parser.set_defaults(run=_conform)


def _make(arguments: argparse.Namespace) -> None:
    from fastdiff.checkpoint.unchanged import config_changes, of_result
    from fastdiff.config.run_record import read_record
    from fastdiff.evaluation.conformance.reference import encode, make

    out: Path = arguments.out
    require(out.suffix == ".json", f"{out}: expected the name of a file to write, with .json, as the last argument")
    first, *others = arguments.runs
    config = read_record(first)["config"]
    seeds = [config["seed"]]
    for run in others:
        other = read_record(run)["config"]
        seeds.append(other["seed"])
        changes = config_changes(config, other, ("seed",))
        require(not changes, f"{first} and {run} are runs of different configurations: {_in_line(changes)}")
    require(len(set(seeds)) == len(seeds), f"runs of a reference differ in --seed; given {', '.join(map(str, seeds))}")
    reference = replace(make(arguments.runs), config=of_result(config))
    require_output(out)
    content = encode(reference)
    write_output(out, content)
    steps = max(step for _, step in reference.expected)
    show(
        f"written: {out} ({len(content) / 1024:.0f} KiB): {len(reference.expected):,} numbers of {reference.runs} "
        f"run{'s' if reference.runs > 1 else ''} up to step {steps:,}"
    )


def _in_line(changes: Mapping[str, str]) -> str:
    return ", ".join(f"--{name}: {change}" for name, change in changes.items())


def _conform(arguments: argparse.Namespace) -> None:
    from fastdiff.config.run_record import require_run
    from fastdiff.evaluation.conformance.report import as_json, in_words

    folder: Path = arguments.folder
    require_run(folder)
    found, differing = _compared(folder, arguments.reference)
    require(
        found.compared > 0,
        f"{folder} and {arguments.reference} have no number in common; the run needs five lines of metrics.jsonl or a "
        "line of statistics.jsonl at a step of the reference",
    )
    if arguments.json:
        print(json.dumps(as_json(found, differing), indent=1))
    else:
        show(in_words(found, arguments.reference, differing, columns(sys.stdout)))
    if found.deviations:
        raise FastdiffError(f"{folder} deviates from {arguments.reference}; the result above says where")


def _compared(folder: Path, name: str) -> tuple["Conformance", dict[str, str]]:
    """Compare a run with a file or the reference of a preset; return the fields that differ, too."""
    from fastdiff.checkpoint.unchanged import config_changes
    from fastdiff.config.run_record import read_record
    from fastdiff.evaluation.conformance import comparison, curve
    from fastdiff.evaluation.conformance.numbers import read_numbers

    if name.endswith(".csv"):
        return curve.compare_with_curve(folder, curve.read_curve(local_path(name))), {}
    expected = _reference(name)
    found = comparison.compare(read_numbers(folder, expected.windows), expected)
    return found, config_changes(dict(expected.config), read_record(folder)["config"], ("seed",))


def _reference(name: str) -> "Reference":
    from fastdiff.evaluation.conformance import reference

    path = local_path(name)
    if path.is_file():
        return reference.read(path)
    if (found := reference.shipped(name)) is not None:
        return found
    known = ", ".join(reference.shipped_names()) or "none"
    raise ConfigError(f"{name}: no such file, and no preset with a reference; presets with one: {known}")
