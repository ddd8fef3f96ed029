"""A reader over the readers of several data sets."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdiff.data.joined.info import JoinedInfo
from fastdiff.data.shards.format import LATENT, LOSS_MASK
from fastdiff.data.shards.numbered import NumberedSamples
from fastdiff.data.shards.reader import Arrays, LatentReader, Substitution

DATA_SET = "data_set"
"""Name of the numbers of the data sets beside the arrays of a batch."""


class JoinedReader(NumberedSamples):
    """Samples of several data sets by number, those of the first data set first; thread-safe.

    A batch has ``data_set`` ``[B]`` int64 beside its arrays, the number of the data set of each sample.

    Args:
        info: of all.
        readers: of each, in this order.
    """

    info: JoinedInfo

    def __init__(self, info: JoinedInfo, readers: Sequence[LatentReader]) -> None:
        self.info, self._readers = info, readers
        self.folder = ", ".join(str(reader.folder) for reader in readers)
        self.substitute = readers[0].substitute
        self.substituted: dict[int, Substitution] = {}
        for reader in readers:
            reader.substituted = self.substituted
        sizes = [len(reader) for reader in readers]
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])

    @property
    def class_numbers(self) -> Sequence[int] | None:
        """As of ``LatentReader``; the data sets have the same classes."""
        return self._readers[0].class_numbers

    @class_numbers.setter
    def class_numbers(self, numbers: Sequence[int] | None) -> None:
        for reader in self._readers:
            reader.class_numbers = numbers

    def read(
        self,
        sample_ids: npt.ArrayLike,
        out: Mapping[str, npt.NDArray[Any]] | None = None,
        *,
        choice: Mapping[str, npt.NDArray[Any]] | None = None,
        positions: npt.NDArray[np.int64] | None = None,
    ) -> Arrays:
        """Read samples of one bucket, as ``LatentReader.read``; captions that are shorter than others end in zeros.

        Pictures of a data set without masks of the loss count everywhere beside one that has some.

        A sample of a data set without mirrored latents is read as it is.
        """
        ids = self._known(sample_ids)
        bucket = self.bucket_of(ids)
        arrays = dict(out) if out is not None else self.empty(len(ids), bucket)
        of_set = self._set_of(ids)
        arrays[DATA_SET][:] = of_set
        for number in np.unique(of_set).tolist():
            rows, reader = np.flatnonzero(of_set == number), self._readers[number]
            own = {name: values[rows] for name, values in (choice or {}).items()}
            if not reader.info.flipped:
                own.pop(LATENT, None)
            part = reader.read(
                ids[rows] - self._starts[number],
                choice=own,
                positions=None if positions is None else positions[rows],
            )
            if LOSS_MASK in arrays and LOSS_MASK not in part:
                arrays[LOSS_MASK][rows] = 1
            for name, values in part.items():
                _copy(values, arrays[name], rows)
        return arrays

    def empty(self, batch: int, bucket: int = 0) -> Arrays:
        """Return uninitialised arrays for ``batch`` samples of a bucket."""
        columns = self.info.batch_columns(bucket)
        arrays: Arrays = {name: np.empty((batch, *column.shape), column.numpy) for name, column in columns.items()}
        if self.info.classes is not None:
            arrays["label"] = np.empty(batch, np.int64)
        return {**arrays, DATA_SET: np.empty(batch, np.int64)}

    def can_mirror(self, sample_ids: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Return of which samples ``[B]`` there is a mirrored form."""
        return np.asarray([each.flipped for each in self.info.sets])[self._set_of(self._known(sample_ids))]

    def null(self) -> Arrays:
        """Return the embedding of the empty prompt, by column; DataError, StorageError: as ``LatentReader``."""
        columns, found = self.info.batch_columns(0), {}
        for name, values in self._readers[0].null().items():
            found[name] = np.zeros(columns[name].shape, values.dtype)
            found[name][: len(values)] = values[: len(found[name])]
        return found

    def keys(self, sample_ids: npt.ArrayLike) -> list[str]:
        """Return ``data set:shard:key`` of samples, for messages."""
        names = [each.name for each in self.info.sets]
        return self._each(sample_ids, lambda number, own: f"{names[number]}:{self._readers[number].keys([own])[0]}")

    def captions(self, sample_ids: npt.ArrayLike) -> list[str]:
        """Return the first caption of each sample, without those that have none; DataError: a sample is damaged."""
        found = self._each(sample_ids, lambda number, own: self._readers[number].captions([own]))
        return [caption for captions in found for caption in captions]

    def close(self) -> None:
        """Close all files; a later read opens them again."""
        for reader in self._readers:
            reader.close()

    def _each(self, sample_ids: npt.ArrayLike, take: Callable[[int, int], Any]) -> list[Any]:
        """Return what ``take`` gives for each sample, by the number of its data set and its own number there."""
        ids = self._known(sample_ids)
        of_set = self._set_of(ids)
        return [
            take(number, own)
            for number, own in zip(of_set.tolist(), (ids - self._starts[of_set]).tolist(), strict=True)
        ]

    def _set_of(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.searchsorted(self._starts, ids, side="right").astype(np.int64) - 1


def _copy(values: npt.NDArray[Any], target: npt.NDArray[Any], rows: npt.NDArray[np.int64]) -> None:
    """Copy samples into rows of a batch, whose captions may be longer: zeros, which masks exclude, fill them up."""
    if values.shape[1:] == target.shape[1:]:
        target[rows] = values
        return
    target[rows] = 0
    target[rows, : values.shape[1]] = values


Shards = LatentReader | JoinedReader
"""A reader of one data set or of several."""
