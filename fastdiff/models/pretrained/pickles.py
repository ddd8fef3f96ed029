"""Published checkpoints (IDDPM, ADM, DiT, SiT): ``.pt`` files of PyTorch, read without executing their code."""

import argparse
import errno
import pickle
import pickletools
import re
import struct
import zipfile
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_DAMAGED = "it is damaged; download or copy it again"
_MORE = "it holds more than tensors; code in it is never run; expected weights alone"
_WEIGHTS = re.compile(
    r"torch\._utils (_rebuild_tensor_v2|_rebuild_parameter)|torch (?!Untyped|Typed)\w+Storage"
    r"|collections OrderedDict|argparse Namespace"
)
"""Names in the pickle of a training, including torch.optim.AdamW's state of tensors, numbers and plain containers.
PyTorch's unpickler would call others, such as ``bytearray`` of any size."""
_UNNAMED = {"STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"}
"""Other opcodes that name an object; ``torch.save`` does not use them."""


def load_published(path: Path) -> dict[str, Tensor]:
    """Read a plain state dict, or the one under ``ema``, otherwise under ``model``, to the CPU.

    Raises:
        ValueError: Unexpected or hostile file; see ``read_published``.
        OSError: The file cannot be read.
    """
    content = read_published(path)
    if "param_groups" in content:
        raise ValueError("it is the state of an optimizer; expected weights")
    state = next((content[name] for name in ("ema", "model") if name in content), content)
    weights = state_dict(state, "expected a state dict, or one under 'ema' or 'model'")
    check_size(weights.values(), path)
    return weights


def read_published(path: Path) -> dict[Any, Any]:
    """Read a dict written by ``torch.save`` to the CPU.

    Every part is compared with the crc32 that the file has of it. No code in the file is run: PyTorch's unpickler makes
    tensors, plain containers and, for the command line in DiT's files, ``argparse.Namespace``. A file that names other
    objects, or is compressed, is not unpickled. Callers pass the tensors that they use to ``check_size``.

    Raises:
        ValueError: Unexpected or hostile file.
        OSError: The file cannot be read.
    """
    _require_plain_zip(path)
    _require_weights_alone(path)
    with torch.serialization.safe_globals([argparse.Namespace]):
        try:
            # Memory-mapped, so that a rank that needs one part does not load all.
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (pickle.UnpicklingError, EOFError, AttributeError, KeyError, TypeError):
            # Without PyTorch's text, which advises to load the file with arbitrary code.
            raise ValueError(_MORE) from None
        except (RuntimeError, IndexError, OverflowError, RecursionError) as error:
            raise ValueError(f"{_DAMAGED} ({(str(error) or type(error).__name__).splitlines()[0][:200]})") from None
    if not isinstance(content, dict):
        raise ValueError(f"expected a dict, it holds {type(content).__name__}")
    return content


def read_arguments(path: Path) -> dict[str, Any]:
    """Return the command line in the file of a training, by argument; empty if the file has none.

    Raises:
        ValueError: Unexpected or hostile file.
        OSError: The file cannot be read.
    """
    found = read_published(path).get("args")
    return vars(found) if isinstance(found, argparse.Namespace) else {}


def state_dict(content: Any, expected: str) -> dict[str, Tensor]:
    """Return ``content`` without gradients if it is a state dict, otherwise raise ValueError(``expected``).

    improved-diffusion saves parameters that require a gradient; copies of them would keep an autograd graph.
    """
    if not isinstance(content, dict):
        raise ValueError(expected)
    if not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()):
        raise ValueError(expected)
    return {name: value.detach() for name, value in content.items()}


def check_size(tensors: Iterable[Tensor], path: Path) -> None:
    """Raise ValueError for tensors that are not plain, or, as expanded views, larger than the file."""
    size, most = 0, path.stat().st_size
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise ValueError("expected plain tensors")
        size += tensor.nbytes
    if size > most:
        raise ValueError(f"its tensors have {size} bytes, more than the {most} of the file")


def _require_plain_zip(path: Path) -> None:
    status = path.stat()
    try:
        if damaged := _damaged_member(path, status.st_size, status.st_mtime_ns):
            raise ValueError(f"{_DAMAGED}: the crc32 of its part {damaged} differs")
    except zipfile.BadZipFile as error:
        raise ValueError(f"{error}: it is cut off, or not what torch.save writes since PyTorch 1.6") from None
    except (NotImplementedError, RuntimeError, OverflowError, EOFError, UnicodeDecodeError, struct.error) as error:
        raise ValueError(f"{_DAMAGED} ({error})") from None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise ValueError(f"{_DAMAGED} (its list of parts leads out of it)") from None


@lru_cache(maxsize=16)
def _damaged_member(path: Path, size: int, changed: int) -> str | None:
    """Return the first part of a zip whose bytes are not those of its crc32; None: there is none.

    Args:
        path: of the file.
        size: of the file in bytes.
        changed: time of its last change in nanoseconds; a file that stays as it is, is read once.

    Raises:
        ValueError: its parts are compressed.
        zipfile.BadZipFile, NotImplementedError, RuntimeError, OverflowError, EOFError, OSError, struct.error: it is
            damaged.
    """
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        packed = [entry for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
        if packed or sum(entry.file_size for entry in entries) > size:
            raise ValueError(
                "its parts are compressed, which torch.save never does: a few bytes could unpack to gigabytes"
            )
        return archive.testzip()


def _require_weights_alone(path: Path) -> None:
    """Check the names in the pickle without running it."""
    try:
        content = torch._C.PyTorchFileReader(str(path)).get_record("data.pkl")  # as torch.load finds it
    except RuntimeError:
        raise ValueError("it has no data.pkl; expected what torch.save writes since PyTorch 1.6") from None
    try:
        names = [(code.name, str(named)) for code, named, _ in pickletools.genops(content)]
    except ValueError as error:
        raise ValueError(f"{_DAMAGED} ({error})") from None
    if any(code in _UNNAMED or (code == "GLOBAL" and not _WEIGHTS.fullmatch(named)) for code, named in names):
        raise ValueError(_MORE)
