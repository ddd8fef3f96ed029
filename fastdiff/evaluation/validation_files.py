"""Files of the run folder with the loss of every validation sample: ``validation/step-N.npz``."""

import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import numpy as np
import numpy.typing as npt

from fastdiff.diffusion.snr_bins import Floats
from fastdiff.errors import StorageError
from fastdiff.run_files import names_inside, read_inside

LINES = "validation.jsonl"
"""File of the run folder with one line per validation; the files of this module have every sample's loss."""
_FOLDER = "validation"
_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})\.npz")
_MOST = 2**30
"""Bytes of the largest file that is read: losses of ten million samples."""
_LEFTOVER = re.compile(r"step-[0-9]{8,}\.npz\.[0-9]+-[0-9a-f]{8}\.tmp")
"""Temporary names of ``files.publish``."""


@dataclass(frozen=True, slots=True)
class Validated:
    """One validation of one run; arrays ``[N]`` by sample."""

    index: npt.NDArray[np.int64]
    """Number of the sample in the data set."""
    log_snr: npt.NDArray[np.float32]
    """Log SNR of its noise level."""
    loss: Floats
    x0_mse: Floats
    """Mean squared error of the estimate of x0 implied by the prediction, in normalised latents; infinite where the
    prediction does not determine x0."""
    about: dict[str, Any]
    """Identity of the measurement: ``data`` (digest of the data set), ``seed`` of the noise, ``objective``, its
    ``unit``, ``precision``, ``weights`` and the ``step`` of the run."""


def encode(validated: Validated) -> bytes:
    """Return the content of the file of a validation."""
    arrays = io.BytesIO()
    np.savez(
        arrays,
        index=validated.index,
        log_snr=validated.log_snr,
        loss=validated.loss,
        x0_mse=validated.x0_mse,
        about=np.array(json.dumps(validated.about)),
    )
    return arrays.getvalue()


def read(run: Path, step: int) -> Validated:
    """Read the file of a step; StorageError if it is damaged, OSError if it cannot be read."""
    path = path_of(run, step)
    try:
        content = io.BytesIO(read_inside(run, path.relative_to(run), _MOST))
        with ZipFile(content) as archive:
            if any(member.compress_type != ZIP_STORED for member in archive.infolist()):
                raise ValueError("it is compressed")
        content.seek(0)
        with np.load(content, allow_pickle=False) as found:
            about = json.loads(str(found["about"]))
            return Validated(found["index"], found["log_snr"], found["loss"], found["x0_mse"], about)
    except (BadZipFile, EOFError, KeyError, ValueError, MemoryError, RecursionError) as error:
        raise StorageError(f"{path}: not a file of losses written by fastdiff ({error})") from None


def steps_of(run: Path) -> list[int]:
    """Return the validated steps, ascending."""
    names = map(_NAME.fullmatch, names_inside(run, _FOLDER))
    return sorted(int(name[1]) for name in names if name is not None)


def drop_after(run: Path, step: int) -> None:
    """Remove the files of later steps, which a resumed run writes again, and incomplete files of killed processes."""
    for name in names_inside(run, _FOLDER):
        if _LEFTOVER.fullmatch(name):
            (run / _FOLDER / name).unlink()
    for known in steps_of(run):
        if known > step:
            path_of(run, known).unlink()


def path_of(run: Path, step: int) -> Path:
    """Return the path of the file of a step."""
    return run / _FOLDER / f"step-{step:08d}.npz"
