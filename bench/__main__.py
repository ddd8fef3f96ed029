"""``python -m bench``: see ``python -m bench --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import BenchError
from bench.cases import KERNELS, OPS, cases
from bench.cases.case import Case

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main(argv: Sequence[str]) -> int:
    """Run one benchmark and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Benchmarks of the kernels.")
    commands = parser.add_subparsers(dest="command", required=True)
    aot = commands.add_parser("aot", help="compile every kernel without a GPU: registers, spills, access widths")
    aot.add_argument("--arch", nargs="+", type=int, default=[80, 90, 100], help="compute capabilities, as in sm_90")
    op = commands.add_parser("op", help="time every op by every implementation")
    op.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    op.add_argument("--quick", action="store_true", help="small batches, few repetitions: does everything run?")
    for command, known in ((aot, KERNELS), (op, OPS)):
        command.add_argument("ops", nargs="*", metavar="OP", help=f"some of: {', '.join(known)}; default: all")
        command.set_defaults(known=known)
        command.add_argument("--dtype", nargs="+", choices=[*_DTYPES], default=[*_DTYPES])
        command.add_argument("--json", type=Path, metavar="FILE", help="file for the same numbers, as JSON lines")
    arguments = parser.parse_args(argv)
    try:
        chosen = _chosen(arguments.ops, arguments.known, arguments.dtype)
        if arguments.command == "aot":
            from bench.aot import main as run_aot

            return run_aot(chosen, arguments.arch, arguments.json)
        from bench.op import main as run_op

        return run_op(chosen, arguments.device, arguments.json, arguments.quick)
    except BenchError as error:
        parser.error(str(error))


def _chosen(ops: Sequence[str], known: tuple[str, ...], dtypes: Sequence[str]) -> list[Case]:
    for op in ops:
        if op not in known:
            raise BenchError(f"op {op!r}: expected some of {', '.join(known)}")
    chosen = [case for case in cases(tuple(ops) or known) if case.dtype in [_DTYPES[name] for name in dtypes]]
    if not chosen:
        raise BenchError(f"no case of {', '.join(ops) or 'any op'} has dtype {' or '.join(dtypes)}")
    return chosen


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
