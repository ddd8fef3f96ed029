"""Random numbers on their own, as many as a batch of latents has."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.cases.case import Case, Inputs
from fastdiff_kernels import philox
from fastdiff_kernels.dispatch import Backend


def _build(device: str) -> Inputs:
    return {"position": torch.arange(64, device=device)}


def _call(inputs: Inputs, backend: Backend) -> Tensor:
    return philox.normal(1, 1, inputs["position"], 4 * 64 * 64, backend)


CASES = [Case(op="philox", shape="normal-4x64x64", dtype=torch.float32, build=_build, call=_call)]
