"""Weights of a DiT as published: a ``.pt`` file by PyTorch, read without running what is in it."""

from __future__ import annotations

import argparse
import pickle
import pickletools
import re
import zipfile
from pathlib import Path

import torch
from torch import Tensor

_MORE = "it holds more than tensors, and code that is not run; expected weights alone"
_WEIGHTS = re.compile(
    r"torch\._utils (_rebuild_tensor_v2|_rebuild_parameter)|torch (?!Untyped|Typed)\w+Storage"
    r"|collections OrderedDict|argparse Namespace"
)
"""What the pickle of weights names; PyTorch's unpickler would call others too, such as ``bytearray`` of any size."""
_UNNAMED = {"STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"}
"""Other ways to name something, which ``torch.save`` does not use."""


def load_published(path: Path) -> dict[str, Tensor]:
    """Read a plain state dict, or the one under ``ema``, on the CPU.

    No code in the file is run: PyTorch's unpickler makes tensors, plain containers and, as the files of DiT hold their
    command line, ``argparse.Namespace``; a file that names anything else is not unpickled at all. The tensors take no
    more memory than the file has bytes: compressed files, and tensors that show a few bytes many times over, are
    refused.

    Raises:
        ValueError: It is another file, or a hostile one.
        OSError: It cannot be read.
    """
    _require_plain_zip(path)
    _require_weights_alone(path)
    with torch.serialization.safe_globals([argparse.Namespace]):
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, EOFError, AttributeError, KeyError, TypeError):
            # Without PyTorch's text, whose advice is to load the file with all that is in it.
            raise ValueError(_MORE) from None
    state = content.get("ema", content) if isinstance(content, dict) else None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError("expected a state dict, or one under 'ema'")
    if any(value.layout != torch.strided or value.device.type != "cpu" for value in state.values()):
        raise ValueError("expected plain tensors")
    size, most = sum(value.nbytes for value in state.values()), path.stat().st_size
    if size > most:
        raise ValueError(f"its tensors have {size} bytes, more than the {most} of the file")
    return state


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
