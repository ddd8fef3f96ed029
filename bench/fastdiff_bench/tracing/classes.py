"""Classes of operations, by the names of operators on the host and of kernels on the device."""

import re
from typing import Literal, TypeAlias, get_args

Class: TypeAlias = Literal[
    "matrix products",
    "attention",
    "convolutions",
    "group norms",
    "norms",
    "activations",
    "elementwise",
    "copies",
    "communication",
    "optimizer",
]
"""Group norms are those of UNets, with the SiLU behind them; norms are all others, with the rotation behind those of
queries and keys; activations are GELU, GEGLU and SwiGLU."""
CLASSES: tuple[Class, ...] = get_args(Class)
IDLE = "idle"
"""Time without any operation: on a CPU that of Python, on a GPU that in which no kernel runs."""

_OPTIMIZER_RANGES = ("optimizer", "averages")
_OPERATORS: tuple[tuple[str, Class], ...] = (
    (r"attention", "attention"),
    (r"adamw8bit|_fused_adam", "optimizer"),
    (r"nccl:|gloo:|c10d::", "communication"),
    (r"conv(olution|\d|_)", "convolutions"),
    (r"group_?norm", "group norms"),
    (r"adaln|rotary|(layer|batch|rms)_?norm", "norms"),
    (r"::_?(gelu|geglu|swiglu)", "activations"),
    (r"::(mm|bmm|addmm|addbmm|baddbmm|addmv|mv|dot|linear|matmul|_linear_\w+)$", "matrix products"),
    (r"::(copy_?|clone|contiguous|_?to(_copy)?|_reshape_copy|cat|stack|_foreach_copy_?|pin_memory)$", "copies"),
)
_NO_WORK = re.compile(
    r"::(_?reshape_alias|_?unsafe_view|view|view_as|reshape|t|transpose|permute|expand|expand_as|slice|select|narrow|"
    r"chunk|split|split_with_sizes|unbind|squeeze|unsqueeze|flatten|as_strided|alias|detach|lift_fresh|empty\w*|"
    r"new_empty\w*|resolve_(conj|neg)|result_type|unfold|diagonal|movedim|swapaxes|numpy_T|item|is_\w+|set_|resize_)$"
)
"""Operators that only describe memory, or get it."""
_COMPILED = "## Call CompiledFxGraph"
"""Beginning of the range of compiled code on a CPU; what is not a call of an operator there is fused elementwise."""
_KERNELS: tuple[tuple[str, Class], ...] = (
    # Inductor names a kernel by the operators it fuses, also if it has only their cast or bias.
    (r"group_?norm", "group norms"),
    (r"triton_(poi|red|per)_.*norm", "norms"),
    (r"gelu|geglu|swiglu|triton_(poi|red|per)_.*(erf|sigmoid|tanh)", "activations"),
    (r"triton_(poi|red|per)_", "elementwise"),
    (r"nccl", "communication"),
    (r"flash|fmha|attention|sdpa", "attention"),
    (r"conv|[fdw]grad|fprop|winograd|implicit_gemm", "convolutions"),
    (r"layer_?norm|adaln|rotary|batch_norm|rms_?norm", "norms"),
    (r"gemm|gemv|nvjet|cutlass|cublas|splitk|xmma", "matrix products"),
    (r"adam|lerp", "optimizer"),
    (r"memcpy|copy|catarray|transpose|nchwtonhwc|nhwctonchw", "copies"),
)


def of_operator(name: str, within: Class | None) -> Class | None:
    """Return the class of an event on the host.

    Args:
        name: of an operator (``aten::mm``) or of a named range.
        within: class of the event around it. What runs inside of the optimizer is all its own; what runs inside of
            another operator belongs to it, except copies.

    Returns:
        None: it is no work by itself.
    """
    if within == "optimizer" or name in _OPTIMIZER_RANGES:
        return "optimizer"
    own = _own_class(name)
    return own if within is None or within == "elementwise" or own == "copies" else within


def _own_class(name: str) -> Class | None:
    if name.startswith(_COMPILED):
        return "elementwise"
    if "::" not in name and ":" not in name:
        return None
    found = next((kind for pattern, kind in _OPERATORS if re.search(pattern, name)), None)
    if found is not None or _NO_WORK.search(name):
        return found
    return "elementwise" if is_operator(name) else None


def is_operator(name: str) -> bool:
    """Return whether an event is a call of an operator."""
    return name.startswith(("aten::", "fastdiff::", "mkldnn::", "c10d::"))


def of_kernel(name: str, launched_within: Class | None) -> Class:
    """Return the class of a kernel, a copy or a fill on a GPU.

    Args:
        name: of the kernel.
        launched_within: class of the operator or range on the host that launched it.
    """
    if launched_within == "optimizer":
        return "optimizer"
    lower = name.lower()
    found = next((kind for pattern, kind in _KERNELS if re.search(pattern, lower)), None)
    return found or ("elementwise" if launched_within in (None, "copies") else launched_within)
