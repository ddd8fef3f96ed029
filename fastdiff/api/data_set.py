"""``fastdiff.webdataset``: a data set as a pipeline of the webdataset package, for training loops of others."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdiff.data.shards.format import DatasetInfo
from fastdiff.errors import DataError
from fastdiff.sanitize import escape

if TYPE_CHECKING:
    from webdataset import WebDataset

_NUMBERS = ("cls", "captions")


def webdataset(path: str | Path, **options: Any) -> WebDataset:
    """Open a data set that ``fastdiff encode`` has written as a ``webdataset.WebDataset``.

    Its samples are dicts, decoded without unpickling: ``__key__``; ``latent.npy`` and the other arrays of
    ``dataset.json`` as numpy arrays of the stored dtype and shape (latents are not normalised); ``cls`` and
    ``captions`` as int; ``json`` as dict. The shards are those of ``dataset.json``, in its order.

    Args:
        path: folder of the data set, on this machine.
        options: of ``webdataset.WebDataset``, for example ``shardshuffle=100`` or ``nodesplitter``; ``shardshuffle`` is
            False by default.

    Returns:
        The pipeline; ``.shuffle``, ``.to_tuple("latent.npy", "cls")``, ``.batched`` and the others follow as usual.

    Raises:
        DataError: there is no data set, or ``dataset.json`` is damaged; while it is read: a sample lacks a field, or a
            field has another content than ``dataset.json`` says.
        StorageError: ``dataset.json`` cannot be read.
    """
    from webdataset import WebDataset

    info, folder = DatasetInfo.read(path), Path(path).absolute()
    shards = [str(folder / shard.name) for shard in info.shards]
    return WebDataset(shards, **{"shardshuffle": False} | options).map(_Decoder(info.components))


@dataclass(frozen=True)
class _Decoder:
    """A decoder of samples, which the worker processes of a loader can receive."""

    components: tuple[str, ...]
    """What every sample must have."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        where = f"{escape(str(sample['__url__']))}, key {escape(str(sample['__key__']))}"
        if missing := set(self.components) - sample.keys():
            raise DataError(
                f"{where}: no {min(missing)}; shards of fastdiff 0.2 and older hold repeated embeddings as hard links, "
                "which the webdataset package skips: encode it again into another folder"
            )
        try:
            return {name: _decoded(name, content) for name, content in sample.items()}
        except ValueError as error:
            raise DataError(f"{where}: a field cannot be decoded ({error}); check it with `fastdiff verify`") from error


def _decoded(name: str, content: Any) -> Any:
    if name.endswith(".npy"):
        return np.load(io.BytesIO(content), allow_pickle=False)
    if name in _NUMBERS:
        return int(content)
    return json.loads(content) if name == "json" else content
