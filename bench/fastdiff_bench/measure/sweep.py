"""Workloads of one command line: every combination of the swept values."""

import argparse
import difflib
import itertools
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from fastdiff.config import deepspeed as deepspeed_config
from fastdiff.config.engine import require_engine
from fastdiff.errors import ConfigError
from fastdiff_bench import BenchError
from fastdiff_bench.measure.workload import Workload

FIELDS = tuple(field.name for field in fields(Workload) if field.name != "model")
"""What is swept."""
_TYPES = get_type_hints(Workload)
_BATCH_ON_CPU = 8


_HELP = {
    "preset": "preset to train; default: dit-s-2-256, with --smoke digits",
    "batch": "samples per step; default: the preset's, on a CPU 8",
    "micro": "samples per forward pass; default: the whole batch, or the preset's",
    "precision": "fp32, bf16 or fp16",
    "compile": "torch.compile of each block",
    "kernels": "backend of fastdiff's own ops, as --performance.kernels",
    "attention": "backend of attention, as --performance.attention",
    "optimizer": "as --optim.name",
    "recompute": "recompute each block in the backward pass",
    "deterministic": "add in a fixed order everywhere; its price: --sweep deterministic=false,true",
    "fp8": "as --performance.fp8; the first 16 steps, which multiply in bf16, are not measured",
    "fp8_weight_gradients": "as --performance.fp8_weight_gradients: fp8 or bf16",
    "cuda_graph": "as --performance.cuda_graph; the first 3 steps, up to the capture, are not measured, it has no "
    "phases, and the trace is of a step without it",
    "grad_accum_order": "as --performance.grad_accum_order: ranks or micro_batches",
    "loader": "as --data.loader",
}


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field of a workload, and ``--sweep``."""
    kinds: dict[Any, dict[str, Any]] = {
        bool | None: {"action": argparse.BooleanOptionalAction}, int | None: {"type": int},
    }  # fmt: skip
    for name, text in _HELP.items():
        parser.add_argument(f"--{name.replace('_', '-')}", help=text, **kinds.get(_TYPES[name], {}))
    parser.add_argument(
        "--model",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="other values of the preset's network: depth=4 size=64",
    )
    add_deepspeed(parser)
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="NAME=V1,V2,...",
        help=f"sweep these values, in every combination with other --sweep flags; NAME: {', '.join(FIELDS)}",
    )  # fmt: skip


def add_deepspeed(parser: argparse.ArgumentParser, default: str = "zero1") -> None:
    """Add ``--deepspeed-config``."""
    what = f"as --deepspeed_config of a run; default: {default}"
    parser.add_argument("--deepspeed-config", dest="deepspeed", default=default, metavar="NAME|FILE", help=what)


def workloads(arguments: argparse.Namespace, device: str) -> list[Workload]:
    """Return the workloads requested by the flags of ``add_workload``, validated.

    Raises:
        BenchError: a name or a value does not exist, a combination is invalid, or two have the same name in the
            record.
    """
    given = {name: getattr(arguments, name) for name in FIELDS} | {"model": tuple(arguments.model)}
    given["preset"] = given["preset"] or ("digits" if arguments.smoke else "dit-s-2-256")
    swept = [_parsed(text) for text in arguments.sweep]
    names = [name for name, _ in swept]
    if len(set(names)) < len(names):
        raise BenchError(f"--sweep {', '.join(names)}: each name once")
    if arguments.find_batch and (given["batch"] or given["micro"] or {"batch", "micro"} & set(names)):
        raise BenchError("--find-batch finds the batch of a step without accumulation; leave out batch and micro")
    if given["batch"] is None and device == "cpu":
        given["batch"] = _BATCH_ON_CPU
    base = Workload(**given)
    found = [
        replace(base, **dict(zip(names, values, strict=True)))
        for values in itertools.product(*(values for _, values in swept))
    ]
    named: dict[tuple[str, str], Workload] = {}
    for workload in found:
        try:  # refuse what no machine can run
            config = workload.config(Path(), Path())
            resolved = deepspeed_config.resolve(workload.deepspeed_json(), config, ranks=1)
            require_engine(config, resolved, device)
        except ConfigError as error:
            raise BenchError(str(error)) from None
        other = named.setdefault((workload.case, workload.provider), workload)
        if other is not workload:
            raise BenchError(
                f"--sweep: two configurations have the name {workload.case}; {workload.provider} in the record "
                f"(--deepspeed-config {other.deepspeed} and {workload.deepspeed}); give each value once, and files "
                "different names"
            )
    return found


def _parsed(text: str) -> tuple[str, Sequence[Any]]:
    """Parse ``batch=8,16`` into a name and its values."""
    name, _, values = text.partition("=")
    if name not in FIELDS:
        near = difflib.get_close_matches(name, FIELDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(FIELDS)}"
        raise BenchError(f"--sweep {text}: there is no {name!r}; {hint}")
    adapter = TypeAdapter(_TYPES[name])
    try:
        return name, [adapter.validate_strings(value.strip()) for value in values.split(",")]
    except ValidationError as error:
        problem = error.errors()[0]
        raise BenchError(
            f"--sweep {text}: {problem['msg']}, given {problem['input']!r}; write for example --sweep batch=8,16"
        ) from None
