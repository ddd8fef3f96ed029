"""``bench emit``: the code that Inductor writes for the compiled blocks on a GPU that is not present, counted.

Dynamo, AOTAutograd and Inductor are the real ones, on the preset's network without memory for its weights; the code is
scheduled and written; with ``--instructions`` its kernels are compiled, and their machine code is counted. Bytes are
those of the operands of each kernel, each counted once, without the libraries' products. Counts, so the result does not
depend on the machine; it depends on the version of torch.
"""

import argparse
from pathlib import Path
from typing import get_args

from fastdiff_bench.arguments import Commands, add_output, open_log
from fastdiff_bench.correctness.baseline import Baseline, add_baseline
from fastdiff_bench.emission import budget, outlook, report
from fastdiff_bench.emission.subject import Subject
from fastdiff_bench.emission.worker import emitted
from fastdiff_bench.instructions.gpus import GPUS
from fastdiff_bench.records import record
from fastdiff_bench.records.record import Measurement
from fastdiff_bench.records.tables import progress
from fastdiff_kernels.names import AttentionBackend

PRESETS = ("dit-xl-2-256", "sd2-512", "iddpm-imagenet64-cond")
"""Presets of the committed record."""
BATCH = 64
BUDGET_BATCHES = {"dit-xl-2-256": 256}
"""Samples per optimizer step in the budget by network, if not the micro-batch, at which the blocks are counted."""


def add(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("emit")
    parser.add_argument(
        "--preset", nargs="+", default=list(PRESETS), metavar="NAME", help=f"default: {' '.join(PRESETS)}"
    )
    parser.add_argument("--arch", type=int, default=90, choices=[*GPUS], help="compute capability: 90 is sm_90")
    parser.add_argument("--batch", type=int, default=BATCH, help="samples per micro-batch; default: %(default)s")
    parser.add_argument("--depth", type=int, help="blocks of a transformer; default: the preset's")
    parser.add_argument(
        "--model",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="other fields of the network, as hidden=2048 heads=32",
    )
    parser.add_argument(
        "--fp8", action="store_true", help="count the wide linear layers in FP8, as with --performance.fp8"
    )
    parser.add_argument(
        "--weight-gradients", default="fp8", choices=["fp8", "bf16"], help="with --fp8; default: %(default)s"
    )
    parser.add_argument(
        "--attention", default="auto", choices=get_args(AttentionBackend), help="its backend; default: %(default)s"
    )
    parser.add_argument(
        "--instructions",
        action="store_true",
        help="compile the kernels of the blocks, and record instead what binds each; a second per kernel",
    )
    parser.add_argument("--budget", action="store_true", help="predict the images per second of a step from the counts")
    parser.add_argument("--code", type=Path, metavar="FOLDER", help="write the code of each block there, to be read")
    add_baseline(parser)
    add_output(parser, "one transformer of two blocks", "emission/<date>_blocks")
    parser.set_defaults(run=_run_command)


def _run_command(arguments: argparse.Namespace) -> int:
    if arguments.smoke:
        arguments.preset, arguments.batch, arguments.depth = ["dit-s-2-256"], 4, 2
    found: list[Measurement] = []
    with open_log(arguments, report.BENCH, "blocks", "emission") as log:
        for preset in arguments.preset:
            subject = Subject(
                preset, arguments.depth, tuple(arguments.model), fp8=arguments.fp8,
                weight_gradients=arguments.weight_gradients, attention=arguments.attention,
            )  # fmt: skip
            progress(f"emitting {subject.name}")
            found += _emit(subject, arguments, log)
    worse = False
    if arguments.baseline is not None:
        measured = {row.case for row in found}
        text, worse = Baseline.read(arguments.baseline, report.BENCH, lambda row: row.case in measured).compare(found)
        print(text)
    return 1 if worse else 0


def _emit(subject: Subject, arguments: argparse.Namespace, log: record.Log) -> list[Measurement]:
    """Emit, print and record the blocks of a network."""
    emission = emitted(subject, arguments.batch, arguments.arch, instructions=arguments.instructions)
    name, blocks = subject.name, emission.blocks
    progress("")
    print(f"{name}, batch {arguments.batch}, sm_{arguments.arch}\n{report.tabulate(blocks)}\n")
    if arguments.instructions:
        print("".join(f"{report.tabulate_launches(block, arguments.arch)}\n\n" for block in blocks))
    batch = BUDGET_BATCHES.get(name, arguments.batch)
    if arguments.budget:
        print(f"predicted on one H200, batch {batch}, counted at {arguments.batch} samples")
        print(f"{budget.tabulate(emission, batch)}\n")
        if outlook.applies(emission):
            print(f"{outlook.tabulate(emission, batch)}\n")
    facts: dict[str, record.Fact] = {"batch": arguments.batch, "arch": arguments.arch, "depth": arguments.depth}
    bound = report.launch_rows(name, blocks, arguments.arch)
    rows = list(bound if arguments.instructions else report.rows(name, blocks, facts))
    predicted = list(budget.rows(name, emission, batch)) if arguments.budget else []
    if arguments.budget and outlook.applies(emission):
        predicted += outlook.rows(name, emission, batch)
    log.write(*rows, *predicted)
    for block in blocks if arguments.code else ():
        arguments.code.mkdir(parents=True, exist_ok=True)
        for way, one in block.passes:
            (arguments.code / f"{name.replace(' ', '-')}-{block.names[0]}-{way}.py").write_text(one.code)
    return rows
