"""Built-in data sets, scikit-learn's digits and synthetic noise, and their encode to latent shards."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdiff.data.shards.format import LATENT, Column, DatasetInfo, Normalisation, Provenance
from fastdiff.data.shards.writer import ShardWriter
from fastdiff.errors import ConfigError
from fastdiff.progress_bar import Bar
from fastdiff.version import __version__


def encode_digits(out: str | os.PathLike[str], *, split: str = "all", samples_per_shard: int = 256) -> DatasetInfo:
    """Write scikit-learn's digits: latents ``[1, 8, 8]`` are the pixels in [-1, 1], without autoencoder.

    Args:
        out: New folder.
        split: ``all`` 1,797 scans; ``train``, the first 1,415; or ``test``, the last 382, from other forms.
        samples_per_shard: Samples per shard; 256 gives 8 shards of ``all``.

    Raises:
        ConfigError: The folder already holds a data set, or the split does not exist.
        StorageError: The folder cannot be written.
    """
    if split not in DIGITS_SPLITS:
        raise ConfigError(f"--split {split}: the digits have the splits {', '.join(DIGITS_SPLITS)}")
    chosen = DIGITS_SPLITS[split]
    provenance = Provenance(source=digits_source(split), transform="pixel / 8 - 1", versions=versions("scikit-learn"))
    template = pixels_template((1, 8, 8), 10, provenance)
    total = chosen.stop - chosen.start
    return write(digits(split), out, template, total=total, samples_per_shard=samples_per_shard)


def encode_synthetic(
    out: str | os.PathLike[str],
    shape: tuple[int, int, int] = (4, 32, 32),
    samples: int = 10_000,
    classes: int = 1000,
    *,
    seed: int = 0,
    samples_per_shard: int = 4096,
) -> DatasetInfo:
    """Write normal noise as latents ``shape`` = ``(C, H, W)`` with random classes, for benchmarks.

    Raises:
        ConfigError: The folder already holds a data set.
        StorageError: The folder cannot be written.
    """
    provenance = Provenance(source=f"synthetic, seed {seed}", transform="none", versions=versions())
    template = pixels_template(shape, classes, provenance)
    source = synthetic(shape, samples, classes, seed)
    return write(source, out, template, total=samples, samples_per_shard=samples_per_shard)


def pixels_template(shape: tuple[int, int, int], classes: int | None, provenance: Provenance) -> DatasetInfo:
    """Describe a data set of float16 latents without normalisation."""
    channels = shape[0]
    return DatasetInfo(
        columns={LATENT: Column(dtype="float16", shape=shape)},
        normalisation=Normalisation(shift=(0.0,) * channels, scale=(1.0,) * channels),
        provenance=provenance,
        classes=classes,
    )


def versions(*packages: str) -> dict[str, str]:
    """Return the versions that affect the bytes of a data set: fastdiff, Python, numpy and ``packages``."""
    found = {name: importlib.metadata.version(name) for name in ("numpy", *packages)}
    return {"fastdiff": __version__, "python": platform.python_version(), **found}


def write(
    source: Iterable[Sample],
    out: str | os.PathLike[str],
    template: DatasetInfo,
    *,
    total: int | None,
    samples_per_shard: int,
) -> DatasetInfo:
    """Write all samples of a source and publish the data set.

    Args:
        source: The samples, in the order of the shards.
        out: New folder.
        template: Content of dataset.json without the shards.
        total: Number of samples for the progress bar; None: unknown.
        samples_per_shard: Samples of every shard except the last.
    """
    with (
        ShardWriter(out, template, samples_per_shard=samples_per_shard) as writer,
        Bar("encode", total, "samples") as bar,
    ):
        for sample in bar.over(source):
            writer.add(sample.key, {LATENT: sample.latent}, sample.label, sample.meta or None)
    return DatasetInfo.read(out)


DIGITS_SOURCE = "scikit-learn load_digits"
"""Prefix of the source in the digits' provenance, by which the evaluation recognises them."""
DIGITS_SPLITS = {"all": slice(0, 1797), "train": slice(0, 1415), "test": slice(1415, 1797)}
"""Ranges of the scans by split. Scans are sorted by form and a form begins at 1415: no form is in both parts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A sample to be written to a shard."""

    key: str
    """Key of letters, digits, ``_`` and ``-``."""
    latent: npt.NDArray[Any]
    """``[C, H, W]`` float16 or float32."""
    label: int | None = None
    """Class; None for unconditional data."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Content of ``<key>.json``; empty: no such file."""


def digits_source(split: str) -> str:
    """Return the source of a split for the provenance."""
    return DIGITS_SOURCE if split == "all" else f"{DIGITS_SOURCE}, {split}"


def digits(split: str = "all") -> Iterator[Sample]:
    """Yield the scans of handwritten digits that come with scikit-learn.

    Yields:
        Samples with a latent ``[1, 8, 8]`` float16 in [-1, 1] (pixel / 8 - 1, exact in float16) and its class
        0-9.
    """
    from sklearn.datasets import load_digits  # the import takes seconds

    scans = load_digits()
    latents = (scans.images / 8 - 1).astype(np.float16)[:, None]
    chosen = DIGITS_SPLITS[split]
    for number in range(len(latents))[chosen]:
        latent, label = latents[number], scans.target[number]
        yield Sample(key=f"{number:09d}", latent=latent, label=int(label))


def synthetic(shape: tuple[int, int, int], samples: int, classes: int, seed: int) -> Iterator[Sample]:
    """Yield normal noise, float16 latents of ``shape`` (C, H, W), with random classes; a function of its arguments."""
    generator = np.random.Generator(np.random.Philox(seed))
    for number in range(samples):
        latent = generator.standard_normal(shape, dtype=np.float32).astype(np.float16)
        yield Sample(key=f"{number:09d}", latent=latent, label=int(generator.integers(classes)))
