"""Digits with captions of several lengths, whose words have fixed random embeddings, and a small text DiT for them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdiff.config.networks.pixart import PixArtConfig
from fastdiff.config.run import RunConfig
from fastdiff.data.shards.format import DatasetInfo, condition_columns
from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.writer import ShardWriter
from tests.support.runs import tiny

TOKENS, WIDTH = 6, 16
_WORDS = ("a", "handwritten", *map(str, range(10)))

Arrays = dict[str, npt.NDArray[Any]]


def embedded(words: tuple[str, ...]) -> Arrays:
    """The embedding of a caption, padded by zeros, and its mask; the empty caption has one token."""
    table = np.random.default_rng(0).standard_normal((len(_WORDS) + 1, WIDTH))
    rows = [_WORDS.index(word) for word in words] or [len(_WORDS)]
    context, mask = np.zeros((TOKENS, WIDTH), np.float16), np.zeros(TOKENS, np.uint8)
    context[: len(rows)], mask[: len(rows)] = table[rows], 1
    return {"context": context, "context_mask": mask}


def encode_captioned(digits: Path, folder: Path) -> Path:
    """The encoded digits with a caption of one, two or three words each."""
    with LatentReader(digits) as reader:
        found, info = reader.read(range(len(reader))), reader.info
    null = embedded(())
    columns = info.columns | condition_columns({name: value.shape for name, value in null.items()}, "float16")
    template: DatasetInfo = replace(info, columns=columns, shards=(), samples=0, classes=None)
    with ShardWriter(folder, template, samples_per_shard=256, null=null) as writer:
        for n, (latent, label) in enumerate(zip(found["latent"], found["label"].tolist(), strict=True)):
            words = ("a", "handwritten", str(label))[n % 3 :]
            writer.add(f"{n:05d}", {"latent": latent, **embedded(words)})
    return folder


def captioned_run(data: Path, folder: Path, steps: int, **changes: Any) -> RunConfig:
    """A text DiT of two blocks; a tenth of the captions is dropped."""
    network = PixArtConfig(
        depth=2, hidden=48, heads=4, channels=1, size=8, caption_dim=WIDTH, caption_tokens=TOKENS, pe_interpolation=1.0
    )
    return tiny(data, folder, steps, model=network, **changes)
