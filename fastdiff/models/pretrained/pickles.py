"""Checkpoints as published (IDDPM, ADM, DiT): ``.pt`` files by PyTorch, read without running what is in them."""

from __future__ import annotations

import argparse
import pickle
import pickletools
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_MORE = "it holds more than tensors, and code that is not run; expected weights alone"
_WEIGHTS = re.compile(
    r"torch\._utils (_rebuild_tensor_v2|_rebuild_parameter)|torch (?!Untyped|Typed)\w+Storage"
    r"|collections OrderedDict|argparse Namespace"
)
"""What the pickle of a training names: the state of torch.optim.AdamW is tensors, numbers and plain containers, too.
PyTorch's unpickler would call others, such as ``bytearray`` of any size."""
_UNNAMED = {"STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"}
"""Other ways to name something, which ``torch.save`` does not use."""


def load_published(path: Path) -> dict[str, Tensor]:
    """Read a plain state dict, or the one under ``ema``, or without one that under ``model``, on the CPU.

    Raises:
        ValueError: It is another file, or a hostile one; see ``read_published``.
        OSError: It cannot be read.
    """
    content = read_published(path)
    if "param_groups" in content:
        raise ValueError("it is the state of an optimizer; expected weights")
    state = next((content[name] for name in ("ema", "model") if name in content), content)
    weights = state_dict(state, "expected a state dict, or one under 'ema' or 'model'")
    check_size(weights.values(), path)
    return weights


def read_published(path: Path) -> dict[Any, Any]:
    """Read what ``torch.save`` has written, a dict, on the CPU.

    No code in the file is run: PyTorch's unpickler makes tensors, plain containers and, as the files of DiT hold their
    command line, ``argparse.Namespace``; a file that names anything else is not unpickled at all, and one that is
    compressed neither. What is used of it is to pass ``check_size``.

    Raises:
        ValueError: It is another file, or a hostile one.
        OSError: It cannot be read.
    """
    _require_plain_zip(path)
    _require_weights_alone(path)
    with torch.serialization.safe_globals([argparse.Namespace]):
        try:
            # Mapped, so that ranks that each read one of the parts do not each hold all of them.
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (pickle.UnpicklingError, EOFError, AttributeError, KeyError, TypeError):
            # Without PyTorch's text, whose advice is to load the file with all that is in it.
            raise ValueError(_MORE) from None
    if not isinstance(content, dict):
        raise ValueError(f"expected a dict, it holds {type(content).__name__}")
    return content


def state_dict(content: Any, expected: str) -> dict[str, Tensor]:
    """Return ``content`` without gradients if it is a state dict; ValueError, with what was expected, if it is not.

    improved-diffusion saves parameters that ask for a gradient: copied from, they would draw a graph behind them.
    """
    if not isinstance(content, dict):
        raise ValueError(expected)
    if not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()):
        raise ValueError(expected)
    return {name: value.detach() for name, value in content.items()}


def check_size(tensors: Iterable[Tensor], path: Path) -> None:
    """Refuse tensors that would take more memory than the file has bytes: that show a few of them many times over.

    Raises:
        ValueError: They do, or they are not plain tensors.
    """
    size, most = 0, path.stat().st_size
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise ValueError("expected plain tensors")
        size += tensor.nbytes
    if size > most:
        raise ValueError(f"its tensors have {size} bytes, more than the {most} of the file")


def _require_plain_zip(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except zipfile.BadZipFile as error:
        raise ValueError(f"{error}; expected what torch.save writes since PyTorch 1.6") from None
    packed = [entry for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
    if packed or sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise ValueError("its parts are compressed, which torch.save never does: a few bytes could unpack to gigabytes")


def _require_weights_alone(path: Path) -> None:
    """Look through the pickle without running it."""
    try:
        content = torch._C.PyTorchFileReader(str(path)).get_record("data.pkl")  # as torch.load finds it
    except RuntimeError:
        raise ValueError("it has no data.pkl; expected what torch.save writes since PyTorch 1.6") from None
    for code, named, _ in pickletools.genops(content):
        if code.name in _UNNAMED or (code.name == "GLOBAL" and not _WEIGHTS.fullmatch(str(named))):
            raise ValueError(_MORE)
