"""Samples, noise levels and batches of the validation loss."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.sections.data import DataConfig
from fastdiff.data.joined.reader import Shards
from fastdiff.data.loading.batches import Normaliser
from fastdiff.data.loading.training_set import open_held_out
from fastdiff.data.shards.format import LATENT, DatasetInfo
from fastdiff.errors import require

_BATCH, _AREA = 16, 64 * 64
"""Samples per forward pass, for latents up to this area in elements; proportionally fewer for larger ones. Without
gradients they take less memory than a training step of a few samples. The batches do not depend on the ranks, so
that equal weights give equal losses; a run divides them by its micro-batch, if that is smaller."""
_GOLDEN = (math.sqrt(5) - 1) / 2

Int64 = npt.NDArray[np.int64]


def open_validation(network: ModelConfig, path: str, cache: str, training: DatasetInfo) -> Shards:
    """Open ``--validation.data``, at ``path``, beside the training data.

    Raises:
        ConfigError: the data do not fit the model, have a class that the training data have not, were encoded
            differently from these, or are these.
        DataError: the data are damaged.
        StorageError: the data cannot be read.
    """
    data = DataConfig(path=path, cache=cache)
    reader = open_held_out(network, data, training.class_names, "--validation.data")
    here, there = reader.info, training
    require(
        here.digest != there.digest,
        f"--validation.data {path} is the training data: their loss does not measure the model on unseen data; hold "
        "samples out of the training and encode them into a separate folder",
    )
    for name, found, expected in (
        ("autoencoder", here.provenance.autoencoder_digest, there.provenance.autoencoder_digest),
        ("text encoder", here.provenance.text_encoder_digest, there.provenance.text_encoder_digest),
        ("scale of the latents", here.x0_normalisation, there.x0_normalisation),
    ):
        require(
            found is None or expected is None or found == expected,
            f"--validation.data {path} was encoded with another {name} than the training data; encode both alike",
        )
    return reader


def spread(available: int, wanted: int) -> Int64:
    """Return the numbers of the validated samples, spread evenly over data that may be sorted: ``[N]`` ascending."""
    count = min(available, wanted)
    return np.arange(count, dtype=np.int64) * available // count


def even_shares(count: int) -> Tensor:
    """Return the midpoints of equal parts of [0, 1), permuted so that neighbours are distant: ``[count]`` fp32."""
    stride = max(1, round(_GOLDEN * count))
    while math.gcd(stride, count) > 1:
        stride += 1
    order = np.arange(count, dtype=np.int64) * stride % count
    return torch.from_numpy((order + 0.5) / count).float()


def batches_of(info: DatasetInfo, index: Int64) -> list[Int64]:
    """Split the places in ``index`` into batches of one bucket each; a function of the data alone."""
    bucket = _buckets(info, index)
    places = np.arange(len(index), dtype=np.int64)
    runs = np.split(places, np.flatnonzero(np.diff(bucket)) + 1)
    sizes = [_batch_size(info, int(bucket[run[0]])) for run in runs]
    return [run[n : n + size] for run, size in zip(runs, sizes, strict=True) for n in range(0, len(run), size)]


def largest_of(info: DatasetInfo, index: Int64, batches: Sequence[Int64]) -> Int64:
    """Return the batch of ``batches_of`` with the most elements."""
    bucket = _buckets(info, index)
    return max(batches, key=lambda rows: len(rows) * math.prod(info.columns_of(int(bucket[rows[0]]))[LATENT].shape))


def _buckets(info: DatasetInfo, index: Int64) -> Int64:
    """Return the bucket of each sample of ``index``."""
    return np.repeat([shard.bucket for shard in info.shards], [shard.samples for shard in info.shards])[index]


def _batch_size(info: DatasetInfo, bucket: int) -> int:
    _, height, width = info.columns_of(bucket)[LATENT].shape
    return max(1, min(_BATCH, _BATCH * _AREA // (height * width)))


def read_batch(reader: Shards, index: Int64, rows: Int64, normalise: Normaliser) -> Batch:
    """Read samples, with their places in ``index`` as their positions.

    Args:
        reader: of the data.
        index: ``[N]`` numbers of the samples in the data.
        rows: ``[B]`` places in ``index``, of samples of one size.
        normalise: of the data, on the device of the batch.
    """
    device = normalise.device
    tensors = {name: torch.from_numpy(value).to(device) for name, value in reader.read(index[rows]).items()}
    return normalise(tensors | {"position": torch.from_numpy(rows).to(device)})
