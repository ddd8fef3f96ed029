"""Samples for all readers: fastdiff's shards, and the same arrays as one npy file each."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastdiff.data.encoding.builtin import versions
from fastdiff.data.shards.format import Column, DatasetInfo, Normalisation, Provenance, idx_path
from fastdiff.data.shards.writer import ShardWriter

KINDS: dict[int, dict[str, tuple[int, ...]]] = {
    151: {"latent": (4, 64, 64), "context": (77, 768)},
    8: {"latent": (4, 32, 32)},
}
"""Arrays of a sample, fp16, by its size in kB: a captioned 512-pixel Stable Diffusion latent, and a DiT latent."""

_BATCHES_PER_SHARD = 2
_MIXED = 1024


@dataclass(frozen=True, slots=True)
class Samples:
    """A data set on disk, the same for every reader."""

    folder: Path
    kilobytes: int
    """Key of ``KINDS``."""
    count: int
    batch: int
    """Samples per batch; the shards and the data set are whole batches."""

    @classmethod
    def write(cls, folder: Path, kilobytes: int, *, at_least: int, batch: int, shards: int = 1) -> Samples:
        """Write random numbers into a new folder, and wait until they are on disk.

        Args:
            folder: must not exist.
            kilobytes: key of ``KINDS``.
            at_least: least number of samples, rounded up to whole shards.
            batch: samples per batch.
            shards: least number of shards.
        """
        per_shard = _BATCHES_PER_SHARD * batch
        samples = cls(folder, kilobytes, per_shard * max(shards, -(-at_least // per_shard)), batch)
        columns = {name: Column(dtype="float16", shape=shape) for name, shape in KINDS[kilobytes].items()}
        template = DatasetInfo(
            columns=columns,
            normalisation=Normalisation(shift=(0.0,) * 4, scale=(1.0,) * 4),
            provenance=Provenance(source="random numbers", transform="none", versions=versions()),
        )
        generator = np.random.default_rng(0)
        samples.arrays.mkdir(parents=True)
        with ShardWriter(samples.shards, template, samples_per_shard=per_shard) as writer:
            for number in range(samples.count):
                sample = {
                    name: generator.random(column.shape, np.float32).astype(np.float16)
                    for name, column in columns.items()
                }
                writer.add(f"{number:09d}", sample)
                for name, array in sample.items():
                    np.save(samples.array(number, name), array)
        os.sync()
        return samples

    @property
    def shards(self) -> Path:
        """Folder of the shards."""
        return self.folder / "shards"

    @property
    def arrays(self) -> Path:
        """Folder of the npy files."""
        return self.folder / "arrays"

    def array(self, number: int, name: str) -> Path:
        """Return the file of one array of one sample."""
        return self.arrays / f"{number:09d}.{name}.npy"

    @property
    def tars(self) -> list[str]:
        """The shards, in order."""
        return sorted(str(path) for path in self.shards.glob("*.tar"))

    @property
    def indices(self) -> list[str]:
        """DALI's index of every shard."""
        return [str(idx_path(Path(tar))) for tar in self.tars]

    @property
    def files(self) -> list[Path]:
        """All files that a reader may read."""
        return [path for folder in (self.shards, self.arrays) for path in folder.iterdir()]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays of a sample."""
        return tuple(KINDS[self.kilobytes])

    @property
    def sample_bytes(self) -> int:
        """Bytes of the values of a sample."""
        return sum(2 * int(np.prod(shape)) for shape in KINDS[self.kilobytes].values())

    @property
    def mixed(self) -> int:
        """Shuffle window in samples, for readers that do not shuffle everything: a number of whole shards."""
        return max(1, _MIXED // self.per_shard) * self.per_shard

    @property
    def per_shard(self) -> int:
        """Samples per shard."""
        return _BATCHES_PER_SHARD * self.batch
