"""``fastdiff plan``: memory, time and price of a run on GPUs that are not at hand, and the command that starts it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastdiff import sanitize
from fastdiff.config.arguments.types import Command, Subcommands, local_path, picture, positive
from fastdiff.console import show, write_line
from fastdiff.errors import ConfigError
from fastdiff.live_line import live_line
from fastdiff.outputs import require_output
from fastdiff.terminal import columns

if TYPE_CHECKING:
    from fastdiff.config.run import RunConfig
    from fastdiff.planning.calibration import Basis
    from fastdiff.planning.gpus import Gpu
    from fastdiff.planning.network import Network

NAME = "plan"
_DEFAULT = ("1xH100", "8xH100", "8xH200", "8xA100", "4x4090")
_OF_EACH = 3
"""Options of each set of GPUs in the table."""
_EXAMPLES = """\
The other flags are those of `fastdiff train`; what they fix is not varied.

  fastdiff plan --preset dit-xl-2-256 --gpus 8xH100 4x3090 2x8xA100 --price 2.5
  fastdiff plan --preset sd2-512 --gpus 8xA100 --optim.name adamw --picture memory.png
  fastdiff plan --preset digits --gpus 8xH200 --from runs/digits
"""


def add(commands: Subcommands) -> None:
    """Register the command."""
    parser: Command = commands.add_parser(
        NAME,
        help="predict memory, time and price of a run on given GPUs",
        description="Predict memory per rank, time, energy and price of a run, for each ZeRO stage, micro-batch, "
        "recomputation and size of moments on the given GPUs, without any of them. Nothing is allocated.",
        epilog=_EXAMPLES,
        usage="fastdiff plan --preset NAME [FLAGS] [FLAGS of fastdiff train]",
        allow_abbrev=False,
    )
    parser.leaves = "flags"
    parser.add_argument(
        "--gpus",
        nargs="+",
        default=list(_DEFAULT),
        metavar="COUNTxNAME",
        help=f"GPUs, with nodes as in 2x8xH100; default: {' '.join(_DEFAULT)}",
    )
    parser.add_argument("--gpu-file", type=local_path, metavar="FILE", help="more GPUs, in the format of gpus.toml")
    parser.add_argument("--price", type=positive, metavar="X", help="per GPU and hour")
    parser.add_argument(
        "--from",
        dest="source",
        type=local_path,
        metavar="RUN_OR_RECORD",
        help="finished run, or record of `bench step`, whose measured step replaces the assumed efficiencies",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--picture", type=picture(".svg", ".pdf"), metavar="FILE", help="draw the memory by class")
    parser.set_defaults(run=_plan, own=parser.flags)


def _plan(arguments: argparse.Namespace) -> None:
    from fastdiff.config.command_line.train_flags import parse
    from fastdiff.config.presets.departures import departure
    from fastdiff.config.trackers import warn_of_problems
    from fastdiff.planning import gpus, options, reported, table

    if arguments.picture is not None:
        require_output(arguments.picture)
    launch, config = parse(arguments.flags, arguments.own)
    with live_line.during("importing torch ..."):
        from fastdiff.models.cost.flops import run_flops
        from fastdiff.models.load import with_local_shape
    config = with_local_shape(config)
    known = gpus.known() if arguments.gpu_file is None else gpus.read(arguments.gpu_file)
    sets = [gpus.parse(text, known) for text in dict.fromkeys(arguments.gpus)]
    with live_line.during("counting the memory of the network ..."):
        network = _network(config)
        basis = _basis(arguments.source, known)
    best, refused = [], []
    for one in sets:
        fitting, falling_out = options.options(config, launch, network, one, basis)
        best += options.distinct(fitting)[:_OF_EACH]
        refused += falling_out
    best.sort(key=lambda planned: -planned.images_per_s.middle)
    if arguments.json:
        found = {
            "network": {
                "kind": config.model.kind, "trained": network.trained, "frozen": network.frozen,
                "flops_per_image": run_flops(config), "flops_per_update": sum(network.update_flops),
            },
            "options": [table.figures(one, config.samples, arguments.price) for one in best],
            "not_possible": [{"gpus": one.gpus.name, "reason": one.reason} for one in refused],
            "reported": reported.figures(config, launch.preset),
            "command": table.command(best[0], launch) if best else None,
        }  # fmt: skip
        print(json.dumps(found, indent=2))
    else:
        heading = "\n".join(filter(None, (_heading(config, network), departure(config, launch.preset))))
        room = columns(sys.stdout)
        reports = list(reported.lines(config, launch.preset, best))
        show("\n".join(table.text(heading, best, refused, config.samples, arguments.price, launch, reports, room)))
    if any(sanitize.argument(word) != word for word in launch.argv):
        write_line(f"fastdiff: warning: {sanitize.LEFT_OUT}")
    warn_of_problems(config.output.report_to)
    if arguments.picture is not None:
        from fastdiff.planning.picture import draw

        draw(arguments.picture, best, config.samples)


def _heading(config: RunConfig, network: Network) -> str:
    from fastdiff.models.adapter_kinds.kinds import kind_of
    from fastdiff.models.cost.flops import run_flops

    counted = f"{_millions(network.trained)} parameters"
    if config.lora.rank:
        stored = "" if config.lora.quantize == "none" else f", its large matrices in {config.lora.quantize}"
        counted = (
            f"{kind_of(config.lora).title} of {kind_of(config.lora).size(config.lora)}, "
            f"{_millions(network.trained)} trained and {_millions(network.frozen)} frozen parameters{stored}"
        )
    update = sum(network.update_flops)
    return (
        f"{config.model.title}, {counted}, {_giga(run_flops(config))} per image, "
        f"{f'{_giga(update)} per update by {config.optim.name}, ' if update else ''}{config.performance.precision}, "
        f"{config.samples:,} samples in {config.steps:,} steps of {config.batch.samples}"
    )


def _millions(parameters: int) -> str:
    millions = parameters / 1e6
    return f"{millions:.1f} M" if millions >= 1 else f"{millions:.2g} M"


def _giga(flops: float) -> str:
    return f"{flops / 1e12:.3g} TFLOP" if flops >= 1e12 else f"{flops / 1e9:.3g} GFLOP"


def _network(config: RunConfig) -> Network:
    import torch

    from fastdiff.planning.network import read_network

    return read_network(config, torch.device("cuda"), varies=not config.performance.stored_blocks)


def _basis(source: Path | None, known: Sequence[Gpu]) -> Basis:
    """Return the basis of the times: assumed, or calibrated by a measured step."""
    import torch

    from fastdiff.planning import calibration, gpus, options
    from fastdiff.planning.network import read_network

    if source is None:
        return calibration.ASSUMED
    measured = calibration.read(source)
    kind = gpus.CPU if measured.device == "cpu" else gpus.of_device(measured.device, known)
    if kind is None:
        raise ConfigError(f"--from {source}: measured on {measured.device}, which is not known; add it by --gpu-file")
    config = measured.config
    device = torch.device("cpu" if kind is gpus.CPU else "cuda")
    network = read_network(config, device)
    work = options.work_of(config, measured.deepspeed, network, measured.ranks)
    return calibration.calibrated(measured, work, gpus.Gpus(kind, 1, measured.ranks))
