"""Names of the ops and of their backends. Free of torch, so that a configuration can check them without it."""

from __future__ import annotations

from typing import Literal, get_args

Backend = Literal["triton", "reference", "compile"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
"""Implementations of an op: the kernel, plain torch, and plain torch through ``torch.compile``."""

OPS = ("philox", "noising", "loss", "group_norm", "adaln", "dropout", "adamw", "adamw8bit")
"""Every op with a Triton kernel and a choice of its own; attention chooses among the kernels of libraries and one."""

KERNELS = (*OPS, "bias_gradient", "gelu", "geglu", "swiglu", "rotary", "fp8", "short_attention")
"""Every file or folder with Triton kernels; ``bias_gradient``, ``gelu``, ``swiglu``, ``rotary`` and ``fp8`` run where
``adaln`` does, ``geglu`` where ``group_norm`` does, the last is a backend of attention.
"""

AttentionBackend = Literal["auto", "sdpa", "cudnn", "flash", "xformers", "short", "reference"]
ATTENTION_BACKENDS: tuple[AttentionBackend, ...] = get_args(AttentionBackend)
"""Implementations of attention (``attention.py``, ``packed_attention.py``)."""
