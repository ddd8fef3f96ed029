"""What the kernels are compiled and measured on: shapes of real models, one file per op."""

from __future__ import annotations

from importlib import import_module

from bench.cases.case import Case
from fastdiff_kernels import dispatch

KERNELS = dispatch.OPS
"""Ops with Triton kernels."""
OPS = (*KERNELS, "attention")


def cases(ops: tuple[str, ...] = OPS) -> list[Case]:
    """The cases of the named ops, each op's in its file's order."""
    return [case for op in ops for case in import_module(f"bench.cases.{op}").CASES]
