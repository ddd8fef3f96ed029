"""``fastdiff encode``: from a source to a folder of latent shards."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable

from tqdm import tqdm

import fastdiff
from fastdiff.data.shards import LATENT, Column, DatasetInfo, Normalisation, Provenance
from fastdiff.data.sources import DIGITS_SPLITS, Sample, digits, digits_source, synthetic
from fastdiff.data.writer import ShardWriter
from fastdiff.errors import ConfigError


def encode_digits(out: str | os.PathLike[str], *, split: str = "all", samples_per_shard: int = 256) -> DatasetInfo:
    """Write scikit-learn's digits: latents ``[1, 8, 8]`` are the pixels in [-1, 1], without autoencoder.

    Args:
        out: New folder.
        split: ``all`` 1,797 scans; ``train``, the first 1,415; or ``test``, the 382 others, of other forms.
        samples_per_shard: 256 gives 8 shards of all.

    Raises:
        ConfigError: The folder already holds a data set, or there is no such split.
        StorageError: It cannot be written.
    """
    if split not in DIGITS_SPLITS:
        raise ConfigError(f"--split {split}: of the digits there are {', '.join(DIGITS_SPLITS)}")
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
        StorageError: It cannot be written.
    """
    provenance = Provenance(source=f"synthetic, seed {seed}", transform="none", versions=versions())
    template = pixels_template(shape, classes, provenance)
    source = synthetic(shape, samples, classes, seed)
    return write(source, out, template, total=samples, samples_per_shard=samples_per_shard)


def pixels_template(shape: tuple[int, int, int], classes: int | None, provenance: Provenance) -> DatasetInfo:
    """A data set whose latents are stored as float16 and used as they are."""
    channels = shape[0]
    return DatasetInfo(
        columns={LATENT: Column(dtype="float16", shape=shape)},
        normalisation=Normalisation(shift=(0.0,) * channels, scale=(1.0,) * channels),
        provenance=provenance,
        classes=classes,
    )


def versions(*packages: str) -> dict[str, str]:
    """Versions that decide the bytes of a data set: ours, Python's, numpy's and those of ``packages``."""
    found = {name: importlib.metadata.version(name) for name in ("numpy", *packages)}
    return {"fastdiff": fastdiff.__version__, "python": platform.python_version(), **found}


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
        template: What dataset.json says besides the shards.
        total: Number of samples, for the progress bar, if it is known.
        samples_per_shard: Size of every shard but the last.

    Returns:
        What was written to dataset.json.
    """
    with ShardWriter(out, template, samples_per_shard=samples_per_shard) as writer:
        for sample in tqdm(source, desc="encode", total=total, unit="sample", disable=None):
            writer.add(sample.key, {LATENT: sample.latent}, sample.label, sample.meta or None)
    return DatasetInfo.read(out)
