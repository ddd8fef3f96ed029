"""Image sets for the comparison of features: npz files in the layout of ADM, folders, and saved statistics.

An npz of images has ``arr_0`` uint8 ``[N, H, W, C]``, C 1 or 3, as ADM's and DiT's scripts write it; other arrays, such
as the labels ``arr_1``, are ignored. An npz of statistics has ``mu`` ``[D]`` and ``sigma`` ``[D, D]``, as pytorch-fid
writes them; ADM's reference files have both. Nothing is resized or cropped.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fastdiff.data.images.decode import BadImage, ImageTransform, PillowDecoder
from fastdiff.data.images.items import LARGEST_IMAGE
from fastdiff.data.images.kinds import READ
from fastdiff.data.images.listing import Listing
from fastdiff.data.selection import Counted, Tally
from fastdiff.errors import ConfigError, DataError
from fastdiff.evaluation.image_metrics import MOST_FEATURES, Gaussian
from fastdiff.files import read_bounded
from fastdiff.sampling.npz import NpyMember, npz_member, npz_names

Pixels = npt.NDArray[np.uint8]
_KINDS = (
    "an npz file with arr_0 uint8 [N, H, W, C] or a folder of images "
    f"({READ}), as reference also an npz file with mu and sigma"
)
_STATISTICS = frozenset({"mu", "sigma"})
_ROUNDING = 1e-4
"""Tolerance of a covariance summed in fp32, relative to its largest eigenvalue: for its asymmetry and for negative
eigenvalues."""


class ImageSet(Protocol):
    """Images of one size, in a fixed order."""

    left_out: tuple[Counted, ...]
    """Pictures that are not in the set, by reason."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""

    def __len__(self) -> int:
        """Number of images."""

    def batches(self, count: int) -> Iterator[Pixels]:
        """Yield ``[B, H, W, C]`` uint8; B is ``count`` except for the last batch.

        Raises:
            DataError: An image is damaged or of another size.
            OSError: The storage cannot be read.
        """

    def name_of(self, index: int) -> str:
        """Return the name of an image for messages."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Reference of a comparison: images, statistics, or both."""

    images: ImageSet | None
    statistics: Gaussian | None


def open_images(path: Path) -> ImageSet:
    """Open a set of images.

    Raises:
        ConfigError: The path is neither an npz file of images nor a folder.
        DataError: The file is damaged, or the folder holds no images.
        OSError: The path cannot be read.
    """
    if path.is_dir():
        return FolderImages(path)
    names = _names(path)
    if "arr_0" not in names:
        raise ConfigError(f"{path} holds {', '.join(sorted(names)[:8]) or 'no arrays'}; expected {_KINDS}")
    return NpzImages(npz_member(path, "arr_0"))


def open_reference(path: Path) -> Reference:
    """Open a set of images, saved statistics, or a file of both.

    Raises:
        ConfigError: The path is neither an npz file of these nor a folder.
        DataError: As ``open_images``, or the statistics are not a mean and a covariance.
        OSError: The path cannot be read.
    """
    names = frozenset() if path.is_dir() else _names(path)
    if not names >= _STATISTICS:
        return Reference(open_images(path), None)
    return Reference(open_images(path) if "arr_0" in names else None, _statistics(path))


class NpzImages:
    """``arr_0`` of an npz file, read batch by batch."""

    left_out: tuple[Counted, ...] = ()

    def __init__(self, member: NpyMember) -> None:
        self._member = member
        shape = member.shape
        if member.dtype != np.uint8 or len(shape) != 4 or shape[3] not in (1, 3):
            raise DataError(f"{member.path}: arr_0 is {member.dtype} {shape}; expected uint8 [N, H, W, C], C 1 or 3")
        self.size = shape[1], shape[2]

    def __len__(self) -> int:
        return self._member.shape[0]

    def batches(self, count: int) -> Iterator[Pixels]:
        """See ``ImageSet``."""
        return self._member.blocks(count)

    def name_of(self, index: int) -> str:
        """See ``ImageSet``."""
        return f"{self._member.path}, image {index}"


class FolderImages:
    """All images below a folder as RGB, by name, chosen as ``fastdiff encode`` does; ``left_out`` counts the others."""

    def __init__(self, folder: Path) -> None:
        if (folder / "run.json").is_file():
            raise ConfigError(f"{folder} is a run; draw its images first: fastdiff sample {folder} --npz samples.npz")
        listing, left_out = Listing.below(folder), Tally()
        listing.count(left_out, Tally())
        self.left_out = left_out.counted()
        self._paths = [folder / name for name in listing.images]
        if not self._paths:
            others = "".join(f"; left out: {each.of_pictures}" for each in self.left_out)
            raise DataError(f"{folder} holds no images; expected {_KINDS}{others}")
        first = _decode([self._paths[0]], PillowDecoder(_covering((1, 1)), threads=1))[0]
        self.size = first[1]
        self._decoder = PillowDecoder(_covering(self.size), threads=os.cpu_count() or 1)

    def __len__(self) -> int:
        return len(self._paths)

    def batches(self, count: int) -> Iterator[Pixels]:
        """See ``ImageSet``."""
        for begin in range(0, len(self._paths), count):
            paths = self._paths[begin : begin + count]
            decoded = _decode(paths, self._decoder)
            for path, (_, size) in zip(paths, decoded, strict=True):
                if size != self.size:
                    raise DataError(
                        f"{path} has {size[1]}x{size[0]} pixels, {self._paths[0]} {self.size[1]}x{self.size[0]}; "
                        "all images must have one size: resize and crop them first, all in the same way"
                    )
            yield np.stack([pixels for pixels, _ in decoded])

    def name_of(self, index: int) -> str:
        """See ``ImageSet``."""
        return str(self._paths[index])


def _covering(size: tuple[int, int]) -> ImageTransform:
    """Return the transform that leaves an image of this size unchanged."""
    return ImageTransform(resolution=1, crop="center", interpolation="nearest", buckets=(size,))


def _decode(paths: list[Path], decoder: PillowDecoder) -> list[tuple[Pixels, tuple[int, int]]]:
    """Return pixels and original sizes of images."""
    found = []
    for path, image in zip(paths, decoder.decode([_read(path) for path in paths]), strict=True):
        if isinstance(image, BadImage):
            raise DataError(f"{path}: {image.reason}; repair or remove it")
        found.append((image.pixels, image.original_size))
    return found


def _read(path: Path) -> bytes:
    try:
        return read_bounded(path, LARGEST_IMAGE)
    except ValueError as error:
        raise DataError(f"{path}: {error}; repair or remove it") from error


def _names(path: Path) -> frozenset[str]:
    if path.suffix != ".npz" or not path.exists():
        what = "neither an npz file nor a folder" if path.exists() else "there is no such file or folder"
        raise ConfigError(f"{path}: {what}; expected {_KINDS}")
    return npz_names(path)


def _statistics(path: Path) -> Gaussian:
    mu, sigma = (npz_member(path, name) for name in ("mu", "sigma"))
    fits = len(mu.shape) == 1 and sigma.shape == mu.shape * 2 and mu.shape[0] <= MOST_FEATURES
    if not fits or {mu.dtype.kind, sigma.dtype.kind} != {"f"}:
        raise DataError(
            f"{path}: mu is {mu.dtype} {mu.shape} and sigma {sigma.dtype} {sigma.shape}; expected floating point [D] "
            f"and [D, D], D at most {MOST_FEATURES}"
        )
    mean, covariance = (member.whole().astype(np.float64) for member in (mu, sigma))
    if not (np.isfinite(mean).all() and np.isfinite(covariance).all()):
        raise DataError(f"{path}: mu or sigma holds values that are not finite; compute them again")
    try:
        variances = np.linalg.eigvalsh(covariance)
    except np.linalg.LinAlgError as error:
        raise DataError(f"{path}: sigma is no covariance ({error}); compute it again") from None
    lopsided = np.abs(covariance - covariance.T).max()
    if max(-variances[0], lopsided) > _ROUNDING * max(variances[-1], 0.0):
        raise DataError(
            f"{path}: sigma is no covariance: its smallest eigenvalue is {variances[0]:.3g} and its largest "
            f"{variances[-1]:.3g}, and it differs from its transpose by up to {lopsided:.3g}; expected none below 0 "
            "and a symmetric matrix, as from np.cov(features, rowvar=False)"
        )
    return Gaussian(mean, covariance)
