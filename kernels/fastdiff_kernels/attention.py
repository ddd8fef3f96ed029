"""Attention without a mask, ``softmax(q k^T / sqrt(head_dim)) v`` (Vaswani et al. 2017, arXiv:1706.03762, eq. 1).

This file chooses among the kernels of libraries and reports its choice. The backend ``short`` is that of a packed
projection (``packed_attention.py``); here, where queries, keys and values come apart, it is ``auto``.

============= ========================================= ======================================================
backend       kernel                                    runs where
============= ========================================= ======================================================
``sdpa``      chosen by torch                           everywhere
``cudnn``     cuDNN, through torch                      sm_80+, 16 bit, head dim a multiple of 8 up to 128
                                                        (256 on sm_90)
``flash``     FlashAttention 2, through torch           sm_80+, 16 bit, head dim up to 256 (padded inside: 40 to
                                                        64, 72 to 96, 80 to 96, 160 to 192)
``xformers``  FlashAttention 3 if installed, otherwise  sm_80+, 16 bit (fp32 up to sm_90), head dim a multiple
              2, otherwise CUTLASS                      of 8 up to 256
``short``     ``short_attention.py``                    packed projections of up to 256 tokens; here ``auto``
``reference`` matrix products and a softmax             everywhere; stores the T x S scores
``auto``      the first that can run of cuDNN (sm_90,   everywhere
              sm_100), flash, other kernels of torch
============= ========================================= ======================================================

The order of ``auto``: on sm_90 cuDNN is published at 1.2-1.3 times FlashAttention 2 forward and 1.4-1.5 times backward
(head dim 64, 1k to 4k tokens; Shah et al. 2024, arXiv:2407.08608, figures 5 and 6); on sm_80 it trails. Without
FlashAttention 3 xformers is FlashAttention 2.

Under ``torch.use_deterministic_algorithms`` the backward passes of ``flash`` and of torch's memory-efficient kernel add
in a fixed order, at a price. torch leaves cuDNN out, and xformers its FlashAttention 2; both are refused here.
``reference`` is matrix products and a softmax, which have fixed orders.

Bytes moved per element of 16 bits, the limit, which all but ``reference`` reach up to re-reads of keys and values:
forward 8 (q, k, v, out), backward 16 (q, k, v, out, dout, dq, dk, dv), and 4 / head_dim for the fp32 row sums.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastdiff_kernels.dispatch import Choice
from fastdiff_kernels.names import ATTENTION_BACKENDS, AttentionBackend

_TORCH = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_CUDNN_ANY_LENGTH = 91501
"""cuDNN before 9.15.1 reads out of bounds where a length is no multiple of 128 (pytorch/pytorch#169849)."""
_CUDNN_256 = 91000
_HALF = (torch.float16, torch.bfloat16)


def attention_reference(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """``attention`` in plain torch, in the dtype of its arguments."""
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5  # [B, H, T, S]
    mixed: Tensor = scores.softmax(-1) @ value  # [B, H, T, head_dim]
    return mixed


class Machine(NamedTuple):
    """The properties that decide which backends can run."""

    device: str
    """Type of the device, as in ``torch.device``."""
    capability: tuple[int, int] = (0, 0)
    """Compute capability of a CUDA device: (9, 0) is sm_90."""
    cudnn: int = 0
    """Version as torch gives it: 91501 is 9.15.1; 0: none."""
    xformers: str | None = "was not tried"
    """Why its operators cannot be used; None: they load."""
    deterministic: bool = False
    """Whether torch refuses nondeterministic kernels (``torch.use_deterministic_algorithms``)."""

    @property
    def architecture(self) -> str:
        """``sm_90``, or the type of the device."""
        return f"sm_{self.capability[0]}{self.capability[1]}" if self.device == "cuda" else self.device


def machine(device: torch.device, asked: AttentionBackend = "auto") -> Machine:
    """Return the properties of this machine that matter to the backend ``asked`` for, for tensors on ``device``."""
    if device.type != "cuda":
        return Machine(device.type)
    here: Machine = _cuda_machine(device)._replace(deterministic=torch.get_deterministic_debug_mode() == 2)
    return here._replace(xformers=xformers_problem()) if asked == "xformers" else here


# As torch.compiler.assume_constant_result does, which imports the compiler in seconds.
machine._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _cuda_machine(device: torch.device) -> Machine:
    cudnn = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    return Machine("cuda", torch.cuda.get_device_capability(device), cudnn)


@cache
def xformers_problem() -> str | None:
    """Return why xformers' operators cannot be used; None if its compiled library loads, which is tried once.

    Its package imports without that library, and then refuses every tensor.
    """
    if find_spec("xformers") is None:
        return "xformers is not installed; pip install 'xformers>=0.0.35,<0.0.36'"
    logger = logging.getLogger("xformers")
    before = logger.disabled
    logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library = import_module("xformers._cpp_lib")
    except Exception as error:  # whatever a broken installation raises
        return f"xformers cannot be imported ({error}); reinstall it"
    finally:
        logger.disabled = before
    failure = getattr(library, "_cpp_library_load_exception", None)
    return None if failure is None else _built_for(getattr(failure, "build_info", None))


def _built_for(build: Any) -> str:
    """Say for which torch xformers is built; None: it has no record of it."""
    version, here = metadata.version("xformers"), f"torch {torch.__version__} (CUDA {torch.version.cuda or 'none'})"
    if build is None:
        return f"xformers {version} has no operators for {here}; install one that is built for it"
    cuda = f"CUDA {build.cuda_version // 100}.{build.cuda_version % 100}" if build.cuda_version else "no CUDA"
    return (
        f"the operators of xformers {version} are built for torch {build.torch_version} ({cuda}) and do not load in "
        f"{here}; install one that is built for it"
    )


_Case = tuple[torch.dtype, int, int, int, Machine]
"""Dtype, head dim, queries, keys, machine."""


def reasons(
    backend: AttentionBackend, dtype: torch.dtype, head_dim: int, query_length: int, key_length: int, here: Machine
) -> str | None:
    """The reason that ``backend`` cannot run, forward and backward; None if it can. A function of its arguments."""
    if backend in ("auto", "sdpa", "short", "reference"):
        return None
    if here.device != "cuda":
        return f"needs a CUDA device, the tensors are on {here.device}"
    if here.capability < (8, 0):
        return f"needs sm_80 or newer, this device is {here.architecture}"
    if here.deterministic and backend in ("cudnn", "xformers"):
        return "is not deterministic, and torch.use_deterministic_algorithms is on"
    if backend == "xformers":
        return _xformers_reason(dtype, head_dim, here)
    if dtype not in _HALF:
        return f"computes in fp16 and bf16, the tensors are {_name(dtype)}"
    if backend == "flash":
        return f"takes head dims up to 256, this is {head_dim}" if head_dim > 256 else None
    return _cudnn_reason(head_dim, query_length, key_length, here)


def _xformers_reason(dtype: torch.dtype, head_dim: int, here: Machine) -> str | None:
    if here.xformers is not None:
        return here.xformers
    if dtype not in _HALF and (dtype != torch.float32 or here.capability[0] > 9):
        return f"computes in fp16 and bf16, up to sm_90 in fp32; the tensors are {_name(dtype)} on {here.architecture}"
    if head_dim % 8 or head_dim > 256:
        return f"takes head dims that are multiples of 8 up to 256, this is {head_dim}"
    return None


def _cudnn_reason(head_dim: int, query_length: int, key_length: int, here: Machine) -> str | None:
    if not here.cudnn:
        return "this torch has no cuDNN"
    limit = 256 if here.capability == (9, 0) and here.cudnn >= _CUDNN_256 else 128
    if head_dim % 8 or head_dim > limit:
        return f"takes head dims that are multiples of 8 up to {limit} on {here.architecture}, this is {head_dim}"
    if key_length == 1:
        return "does not take a single key"
    if here.cudnn < _CUDNN_ANY_LENGTH and (query_length % 128 or key_length % 128):
        return f"needs cuDNN 9.15.1 for lengths {query_length} x {key_length} (multiples of 128 would do)"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def preference(capability: tuple[int, int]) -> tuple[AttentionBackend, ...]:
    """Backends that ``auto`` tries on a CUDA device, best first; after them it takes the other kernels of torch."""
    return ("cudnn", "flash") if capability[0] in (9, 10) else ("flash",)


def validate_backend(backend: str) -> None:
    """Raise ValueError if there is no such backend."""
    if backend not in ATTENTION_BACKENDS:
        raise ValueError(f"attention backend {backend!r}: expected one of {', '.join(ATTENTION_BACKENDS)}")


def validate(query: Tensor, key: Tensor, value: Tensor, backend: str) -> None:
    """Raise ValueError if the arguments of an attention do not fit, or there is no such backend."""
    validate_backend(backend)
    if query.ndim != 4 or key.ndim != 4 or key.shape != value.shape:
        raise ValueError(f"attention: {_shapes(query, key, value)}, expected [B, H, T, D] and twice [B, H, S, D]")
    if query.shape[:2] != key.shape[:2] or query.shape[3] != key.shape[3]:
        raise ValueError(f"attention: {_shapes(query, key, value)}, expected the same B, H and head_dim in all")
    if not query.dtype == key.dtype == value.dtype or not query.device == key.device == value.device:
        given = ", ".join(f"{_name(t.dtype)} on {t.device}" for t in (query, key, value))
        raise ValueError(f"attention: query, key, value are {given}, expected one dtype and device; cast them first")


def _shapes(*tensors: Tensor) -> str:
    return "query, key, value have shapes " + ", ".join(str(tuple(t.shape)) for t in tensors)


def _refused(backend: str, why: str) -> RuntimeError:
    return RuntimeError(f"attention backend {backend!r}: {why}; use 'auto'")


@torch.library.custom_op("fastdiff::attention_xformers", mutates_args=())
def _xformers(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output ``[B, T, H, head_dim]`` and fp32 log-sum-exp ``[B, H, T]``; opaque to ``torch.compile``."""
    # Imported only where it runs: the import alone warns on a machine without CUDA.
    from xformers.ops.fmha import memory_efficient_attention_forward_requires_grad as forward

    out, lse = forward(query, key, value)
    return out.contiguous(), lse[..., : query.shape[1]].contiguous()  # CUTLASS pads the rows


@_xformers.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty((batch, heads, length), dtype=torch.float32)


@torch.library.custom_op("fastdiff::attention_xformers_backward", mutates_args=())
def _xformers_backward(
    upstream: Tensor, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    from xformers.ops.fmha import memory_efficient_attention_backward as backward

    dq, dk, dv = backward(upstream.contiguous(), out, lse, query, key, value)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@_xformers_backward.register_fake
def _(
    upstream: Tensor, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *inputs)


def _backward(ctx: Any, upstream: Tensor, _: Tensor | None) -> Sequence[Tensor]:
    gradients: Sequence[Tensor] = _xformers_backward(upstream, *ctx.saved_tensors)
    return gradients


_xformers.register_autograd(_backward, setup_context=_setup_context)


def _order(backend: AttentionBackend, case: _Case) -> list[SDPBackend]:
    """The kernels of torch that may run, best first."""
    if backend != "auto":
        return [_TORCH[backend]]
    able = [_TORCH[b] for b in preference(case[-1].capability) if reasons(b, *case) is None]
    return [*able, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention(query: Tensor, key: Tensor, value: Tensor, *, backend: AttentionBackend = "auto") -> Tensor:
    """Attention of every query over all keys, scaled by ``1 / sqrt(head_dim)``.

    Args:
        query: ``[B, H, T, head_dim]``; any strides, so that it can be a view of a packed projection.
        key: ``[B, H, S, head_dim]``, of the dtype and device of ``query``.
        value: like ``key``.
        backend: see the table above; ``auto``, ``sdpa`` and ``reference`` always run, any other runs or raises.

    Returns:
        ``[B, H, T, head_dim]`` in the dtype of ``query``.

    Raises:
        ValueError: no such backend, or shapes, dtypes or devices that do not fit.
        RuntimeError: ``backend`` cannot run on these tensors; the message says why.
    """
    validate(query, key, value, backend)
    backend = "auto" if backend == "short" else backend
    if backend == "reference":
        return attention_reference(query, key, value)
    here: Machine = machine(query.device, backend)
    if backend == "sdpa" or (backend == "auto" and here.device != "cuda"):
        return F.scaled_dot_product_attention(query, key, value)
    case = (query.dtype, query.shape[-1], query.shape[-2], key.shape[-2], here)
    if why := reasons(backend, *case):
        raise _refused(backend, why)
    if backend == "xformers":
        # [B, H, T, head_dim] -> [B, T, H, head_dim], and back
        out: Tensor = _xformers(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))[0]
        return out.transpose(1, 2)
    with sdpa_kernel(_order(backend, case), set_priority=True):
        return F.scaled_dot_product_attention(query, key, value)


def kernels(
    backend: AttentionBackend, device: torch.device, dtype: torch.dtype, head_dim: int, query_length: int,
    key_length: int,
) -> AbstractContextManager[None]:  # fmt: skip
    """Return a context in which ``F.scaled_dot_product_attention`` of other code runs the kernel of a backend.

    Masks are allowed: ``auto`` then takes the first kernel with masks.

    Args:
        backend: as for ``attention``, but for ``xformers``.
        device: of the tensors.
        dtype: of the tensors.
        head_dim: channels of a head.
        query_length: queries per sample.
        key_length: keys per sample.

    Raises:
        RuntimeError: the backend cannot run there; the message says why.
    """
    if backend == "reference":
        return sdpa_kernel(SDPBackend.MATH)
    backend = "auto" if backend == "short" else backend
    here: Machine = machine(device, backend)
    if backend == "sdpa" or (backend == "auto" and here.device != "cuda"):
        return nullcontext()
    case = (dtype, head_dim, query_length, key_length, here)
    why = "is no kernel of torch" if backend == "xformers" else reasons(backend, *case)
    if why:
        raise _refused(backend, why)
    return sdpa_kernel(_order(backend, case), set_priority=True)


def _chosen_by_torch(query: Tensor, key: Tensor, backend: AttentionBackend, case: _Case) -> str:
    ordered = backend == "auto" and case[-1].device == "cuda"
    with sdpa_kernel(_order(backend, case), set_priority=True) if ordered else nullcontext():
        return name_of(torch._fused_sdp_choice(query, key, key))


def name_of(kernel: int) -> str:
    """Return the name of a kernel by torch's number."""
    return next((name for name, known in _TORCH.items() if known.value == kernel), "another kernel")


def _why(backend: AttentionBackend, case: _Case) -> str:
    here = case[-1]
    if backend == "sdpa" or here.device != "cuda":
        return f"torch's choice on {here.architecture}"
    refused = [f"{b} {why}" for b in preference(here.capability) if (why := reasons(b, *case))]
    return "; ".join(refused) or f"first choice on {here.architecture}"


def _fails(query: Tensor, key: Tensor, backend: AttentionBackend) -> str | None:
    """Run ``backend`` once, forward and backward; return the error message, or None."""
    try:
        with torch.enable_grad():
            attention(query, key, key, backend=backend).sum().backward()  # type: ignore[no-untyped-call]
    except (RuntimeError, ImportError) as error:  # NotImplementedError of xformers is a RuntimeError
        return f"failed when tried: {error}"
    return None


def choice(
    head_dim: int, query_length: int, key_length: int, example: Tensor, backend: AttentionBackend = "auto"
) -> Choice:
    """The kernel that ``attention`` would run, and the reason.

    torch and xformers choose for one small head on the device of ``example``.

    Args:
        head_dim: channels of a head.
        query_length: queries per sample.
        key_length: keys per sample.
        example: any tensor of the device and dtype that the attention will work in.
        backend: as for ``attention``.

    Raises:
        ValueError: no such backend.
        RuntimeError: ``backend`` cannot run there; the message says why.
    """
    validate_backend(backend)
    if backend == "short":
        return replace(choice(head_dim, query_length, key_length, example), why="short takes a packed projection")
    here: Machine = machine(example.device, backend)
    case = (example.dtype, head_dim, query_length, key_length, here)
    if backend == "reference":
        return Choice("attention", "reference", "reference", "asked for")
    query, key = (
        torch.zeros(1, 1, length, head_dim, device=example.device, dtype=example.dtype, requires_grad=True)
        for length in (query_length, key_length)
    )
    if backend in ("auto", "sdpa"):
        kernel = f"sdpa ({_chosen_by_torch(query, key, backend, case)})"
        return Choice("attention", kernel, kernel, _why(backend, case))
    if why := reasons(backend, *case) or _fails(query, key, backend):
        raise _refused(backend, why)
    kernel = "xformers" if backend == "xformers" else f"sdpa ({backend})"
    return Choice("attention", kernel, kernel, "asked for")
