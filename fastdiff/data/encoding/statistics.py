"""Statistics of latents, by which they become x0: the autoencoder's own, those of a file, or measured while encoding.

Each partition has ``train-000012.sums.safetensors`` beside its shards: sums of the stored values and of their squares,
in float64, image after image in the order of the shard. The rank that publishes adds the partitions up in their order,
so the result has the same bits for any number of ranks and after any kill. Sums over the positions of a channel are
exact (``math.fsum``), whatever instructions the processor has.
"""

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, load_file, save

from fastdiff.data.shards.format import INFO_FILE, DatasetInfo, Normalisation, canonical_json
from fastdiff.errors import ConfigError, DataError, StorageError, require
from fastdiff.files import publish
from fastdiff.models.encoders.family import LatentSpace
from fastdiff.models.pretrained.pickles import read_published

OWN, MEASURED = "own", "measured"
Float64 = npt.NDArray[np.float64]
Unit = Literal["channel", "element"]


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """The choice of the statistics of an encode.

    Attributes:
        known: Shift and scale of a latent, or of the mean of a posterior; None: they are measured.
        described: In words, for ``dataset.json``; empty: the autoencoder's own.
    """

    known: Normalisation | None
    unit: Unit
    variance_eps: float
    described: str
    columns: dict[str, Normalisation]
    """Of columns beside the latents; those of others are measured."""

    @property
    def shown(self) -> str:
        """In words, for the start of an encode."""
        return self.described or f"its own, per {self.unit}"

    @property
    def plan(self) -> dict[str, str]:
        """What the plan of an encode has of it; nothing of the autoencoder's own, which its digest covers."""
        if not self.described:
            return {}
        if self.known is None:
            return {"statistics": self.described}
        every = [self.known, *(found for _, found in sorted(self.columns.items()))]
        values = [[found.shift, found.scale] for found in every]
        return {"statistics": hashlib.sha256(canonical_json(values)).hexdigest()}


def choose(asked: str | None, space: LatentSpace) -> Statistics:
    """Return the statistics that ``--statistics`` asks for.

    Args:
        asked: ``own``, ``measured``, or the path of a file or a data set; None: the own ones if there are any.
        space: Latents of the autoencoder.

    Raises:
        ConfigError: There are no own ones, or the file has none, or others than the recipe: per channel where that has
            them per element.
    """
    per: Unit = "element" if space.has_statistics and len(space.shift) > space.channels else "channel"
    asked = asked or (OWN if space.has_statistics else MEASURED)
    if asked == OWN:
        require(
            space.has_statistics,
            f"--statistics {OWN}: the autoencoder has no statistics of its latents; use --statistics {MEASURED}, or "
            "name the file of its recipe",
        )
        own = Normalisation(shift=space.shift, scale=space.scale)
        return Statistics(known=own, unit=per, variance_eps=space.variance_eps, described="", columns={})
    if asked == MEASURED:
        described = f"measured per {space.measured_per}"
        return Statistics(
            known=None, unit=space.measured_per, variance_eps=space.variance_eps, described=described, columns={}
        )
    found = statistics_of_file(asked, space)
    unit: Unit = "element" if len(found.shift) > space.channels else "channel"
    described = f"per {unit}, of {asked}"
    return Statistics(
        known=found, unit=unit, variance_eps=space.variance_eps, described=described, columns=_of_columns(Path(asked))
    )


def statistics_of_file(path: str, space: LatentSpace) -> Normalisation:
    """Return the statistics of a data set, or of a published file, of these latents; ConfigError as ``choose``."""
    found = _of_file(Path(path), space)
    _require_unit(path, found, space)
    return found


def _require_unit(path: str, found: Normalisation, space: LatentSpace) -> None:
    count = len(found.shift)
    expected = space.channels * (space.side or 1) ** 2 if space.measured_per == "element" else space.channels
    require(
        count == expected,
        f"--statistics {path} has {count} means, expected {expected}: the recipe of this autoencoder has one per "
        f"{space.measured_per}",
    )


def _of_file(path: Path, space: LatentSpace) -> Normalisation:
    """Return the statistics of another data set, or of a published file: ``mean`` with ``std`` or ``var``."""
    if (folder := _data_set(path)) is not None:
        return DatasetInfo.read(folder).x0_normalisation
    values = {name: np.asarray(value, np.float64).squeeze() for name, value in _arrays(path).items()}
    if "mean" not in values or not {"std", "var"} & values.keys():
        raise ConfigError(
            f"--statistics {path} holds {', '.join(sorted(values)) or 'nothing'}; expected mean with std or var, or "
            "the folder of a data set"
        )
    deviation = values["std"] if "std" in values else np.sqrt(values["var"] + space.variance_eps)
    mean = np.broadcast_to(values["mean"], deviation.shape)
    require(
        bool((deviation > 0).all()) and bool(np.isfinite(mean).all()),
        f"--statistics {path} has a deviation that is not above 0, or a mean that is not finite",
    )
    return _rounded(mean, 1 / deviation)


def _data_set(path: Path) -> Path | None:
    return path if path.is_dir() else path.parent if path.name == INFO_FILE else None


def _of_columns(path: Path) -> dict[str, Normalisation]:
    folder = _data_set(path)
    return {} if folder is None else DatasetInfo.read(folder).normalisations


def _arrays(path: Path) -> Mapping[str, Any]:
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as content:
                return dict(content)
        return {name: value for name, value in read_published(path).items() if hasattr(value, "shape")}
    except OSError as error:
        reason = error.strerror or error
    except Exception as error:  # of three libraries, each with errors of its own
        reason = str(error).splitlines()[0]
    raise ConfigError(
        f"--statistics {path} cannot be read ({reason}); expected {OWN}, {MEASURED}, the folder of a data set, or a "
        "file .pt, .safetensors or .npz with mean and std or var"
    )


class PartitionSums:
    """Sums over the stored latents of one partition.

    Args:
        unit: Of the latents; other columns are summed per element.
        posterior: Whether latents are mean and standard deviation of a posterior: the variance is then that of its
            samples.
    """

    def __init__(self, unit: Unit, *, posterior: bool) -> None:
        self._unit, self._posterior = unit, posterior
        self._sums: dict[tuple[str, int], Float64] = {}
        self._counts: dict[tuple[str, int], int] = {}

    def add(self, column: str, bucket: int, values: npt.NDArray[Any]) -> None:
        """Add the values of one image: latents ``[C, H, W]``, or ``[2C, H, W]``, or another column."""
        exact, where = values.astype(np.float64), (column, bucket)
        if self._posterior and exact.ndim == 3:
            exact, deviation = np.split(exact, 2)
            squares = exact * exact + deviation * deviation
        else:
            squares = exact * exact
        if where not in self._sums:
            self._sums[where], self._counts[where] = np.zeros((2, *exact.shape)), 0
        self._sums[where][0] += exact
        self._sums[where][1] += squares
        self._counts[where] += 1

    def write(self, path: Path) -> None:
        """Write the sums durably; raises OSError."""
        publish(path, save(self._collected()))

    def _collected(self) -> dict[str, Float64]:
        """Return ``[3, ...]`` by column: the number of values, their sum, the sum of their squares."""
        found: dict[str, Float64] = {}
        for column in dict.fromkeys(name for name, _ in self._sums):
            parts = [(self._sums[where], self._counts[where]) for where in sorted(self._sums) if where[0] == column]
            if parts[0][0].ndim == 4 and self._unit == "channel":
                found[column] = _per_channel(parts)
            else:
                [(sums, count)] = parts
                found[column] = np.stack([np.full(sums.shape[1:], float(count)), *sums])
        return found


def _per_channel(parts: Sequence[tuple[Float64, int]]) -> Float64:
    """Sum ``[2, C, H, W]`` of each bucket over its positions, exactly: ``[3, C]``."""
    count = sum(number * math.prod(sums.shape[2:]) for sums, number in parts)
    channels = parts[0][0].shape[1]
    totals = [
        [math.fsum(value for sums, _ in parts for value in sums[what, channel].flat) for channel in range(channels)]
        for what in range(2)
    ]
    return np.stack([np.full(channels, float(count)), *np.array(totals)])


def sums_path(folder: Path, partition: int) -> Path:
    """Return the path of the sums of a partition."""
    return folder / f"train-{partition:06d}.sums.safetensors"


def merged(paths: Iterable[Path], columns: Collection[str], eps: float) -> dict[str, Normalisation]:
    """Return the statistics of all partitions, by column.

    Args:
        paths: Of their sums, in order.
        columns: That are wanted.
        eps: Added to the variance before the root.

    Raises:
        DataError: A file is missing or damaged, or a channel or an element has the same value in all images.
        StorageError: A file cannot be read.
    """
    totals: dict[str, Float64] = {}
    for path in paths:
        for column, sums in _read(path, columns).items():
            totals[column] = totals[column] + sums if column in totals else sums
    found = {}
    for column, (count, total, squares) in totals.items():
        mean = total / count
        variance = np.maximum(squares / count - mean * mean, 0.0) + eps
        if not variance.all():
            where = tuple(map(int, np.argwhere(variance == 0)[0]))
            raise DataError(
                f"the {column} has the same value {mean[where]:g} in all images at {list(where)}, so it has no scale; "
                "encode more images, or use statistics of another data set with --statistics"
            )
        found[column] = _rounded(mean, 1 / np.sqrt(variance))
    return found


def _read(path: Path, columns: Collection[str]) -> dict[str, Float64]:
    try:
        found = load(path.read_bytes())
        return {column: found[column] for column in columns}
    except KeyError as error:
        reason = f"it has no {error}"
    except FileNotFoundError:
        reason = "it is missing"
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    except SafetensorError as error:
        reason = str(error)
    raise DataError(
        f"{path} cannot be used ({reason}); delete the shards {path.name.split('.')[0]}*.tar, and the same command "
        "encodes them again"
    )


def _rounded(shift: Float64, scale: Float64) -> Normalisation:
    """Return values that are float32, in their shortest decimals: ``dataset.json`` stays small."""
    both = [[float(f"{value:.9g}") for value in each.astype(np.float32).flat] for each in (shift, scale)]
    return Normalisation(shift=tuple(both[0]), scale=tuple(both[1]))
