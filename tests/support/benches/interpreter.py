"""A faster interpreter of Triton with equal results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastdiff_kernels import launch


@contextmanager
def patching_once() -> Iterator[None]:
    """Patch Triton's language once per launch; the interpreter does it again for every function that a kernel calls.

    That takes half of the time of a small launch, and the second patch puts what the first one put.
    """
    if not launch.INTERPRETED:
        yield
        return
    from triton.runtime import interpreter

    patch, tl = interpreter._patch_lang, launch.tl

    def once(function: Any) -> Any:
        modules = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        patched = not any(tl.core.is_builtin(module.load) for module in modules)
        return interpreter._LangPatchScope() if patched else patch(function)

    interpreter._patch_lang = once
    try:
        yield
    finally:
        interpreter._patch_lang = patch
