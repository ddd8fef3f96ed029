"""A faster interpreter of Triton with equal results."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

from fastdiff_kernels import launch


@contextmanager
def patching_once() -> Iterator[None]:
    """Patch Triton's language once per launch; the interpreter does it again for every function that a kernel calls.

    That takes half of the time of a small launch, and the second patch puts what the first one put. Most of the rest
    goes to types of tensors, which are made anew for each operation; they never change, so each is made once.
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

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(interpreter, "_patch_lang", once)
        _keep_types(patches, tl.core, interpreter)
        yield


def _keep_types(patches: pytest.MonkeyPatch, core: Any, interpreter: Any) -> None:
    """Keep what is derived from the name of a type and a shape."""
    make_block, make_tensor, numpy_type = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    blocks: dict[Any, dict[str, Any]] = {}
    dtypes: dict[str, Any] = {}

    def value(size: Any) -> Any:
        return size.value if isinstance(size, core.constexpr) else size

    def block_init(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, getattr(element_ty, "address_space", None), *map(value, shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    @cache
    def sizes(shape: tuple[int, ...]) -> tuple[Any, Any]:
        made = object.__new__(core.tensor)
        make_tensor(made, None, core.block_type(core.int32, shape) if shape else core.int32)
        assert vars(made).keys() == {"handle", "shape", "numel", "type", "dtype"}, "what tensor_init sets"
        return made.shape, made.numel

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = sizes(type.shape if type.is_block() else ())

    def dtype_of(type: Any) -> Any:
        if type.name not in dtypes:
            dtypes[type.name] = numpy_type(type)
        return dtypes[type.name]

    patches.setattr(core.block_type, "__init__", block_init)
    patches.setattr(core.tensor, "__init__", tensor_init)
    patches.setattr(interpreter, "_get_np_dtype", dtype_of)
