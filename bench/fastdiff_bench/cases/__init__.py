"""Benchmark cases of the kernels: shapes of real models, one file per op."""

import argparse
from importlib import import_module

import torch

from fastdiff_bench import BenchError
from fastdiff_bench.cases.case import Case
from fastdiff_kernels import names

KERNELS = names.KERNELS
"""Files with Triton kernels."""
OPS = (*names.OPS, "bias_gradient", "gelu", "geglu", "swiglu", "rotary", "fp8", "attention", "weight_gradient")
"""Ops with implementations to compare; those of ``attention`` include the kernels of ``short_attention``, and those of
``weight_gradient`` are products of torch.
"""


def cases(ops: tuple[str, ...] = OPS) -> list[Case]:
    """Return the cases of the named ops, in the order of their files."""
    return [case for op in ops for case in import_module(f"fastdiff_bench.cases.{op}").CASES]


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def add_choice(parser: argparse.ArgumentParser, known: tuple[str, ...]) -> None:
    """Add the flags that select cases of the ``known`` ops."""
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"some of: {', '.join(known)}; default: all")
    parser.add_argument("--dtype", nargs="+", choices=[*_DTYPES], default=[*_DTYPES])


def chosen(arguments: argparse.Namespace, known: tuple[str, ...]) -> list[Case]:
    """Return the cases selected by the flags; BenchError if there is no such op, or no case of these dtypes."""
    for op in arguments.ops:
        if op not in known:
            raise BenchError(f"op {op!r}: expected some of {', '.join(known)}")
    found = [c for c in cases(tuple(arguments.ops) or known) if c.dtype in [_DTYPES[name] for name in arguments.dtype]]
    if not found:
        of, dtypes = ", ".join(arguments.ops) or "any op", " or ".join(arguments.dtype)
        raise BenchError(f"no case of {of} has dtype {dtypes}")
    return found
