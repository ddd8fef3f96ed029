"""Small images and encodes of them, for tests."""

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from fastdiff.data.encoding.images import encode_images
from fastdiff.data.encoding.options import EncodeOptions
from fastdiff.data.encoding.plan import EncodeFolder, PartitionRecord
from fastdiff.data.encoding.source_metadata import PartitionMetadata
from fastdiff.errors import Preempted


def picture(number: int, size: tuple[int, int] = (32, 32)) -> Image.Image:
    """Noise of this height and width."""
    generator = np.random.default_rng(number)
    return Image.fromarray(generator.integers(0, 256, (*size, 3), dtype=np.uint8))


def classed(folder: Path, numbers: Iterable[int], side: int = 32) -> Path:
    """A folder of square pictures, PNGs of these numbers in two folders of classes."""
    for number in numbers:
        path = folder / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number, (side, side)).save(path)
    return folder


def captioned(folder: Path, captions: Sequence[Any], sizes: Sequence[tuple[int, int]] | None = None) -> Path:
    """A folder of PNG images with metadata.jsonl, one row per caption (or list of captions)."""
    folder.mkdir(parents=True)
    rows = []
    for number, caption in enumerate(captions):
        name = f"{number:03d}.png"
        picture(number, sizes[number] if sizes else (32, 32)).save(folder / name)
        rows.append(json.dumps({"file_name": name, "text": caption}))
    (folder / "metadata.jsonl").write_text("\n".join(rows))
    return folder


def encode(
    source: Path, out: Path, pretrained: Path | str, *, say: Callable[[str], None] | None = None, **options: Any
) -> list[str]:
    """Encode in this process and return what was said, unless ``say`` takes it."""
    said: list[str] = []
    defaults: dict[str, Any] = {"resolution": 32, "decode": "pillow", "batch": 3, "samples_per_shard": 4, "workers": 1}
    encode_images(
        EncodeOptions(source=str(source), out=out, pretrained=str(pretrained), **defaults | options), say or said.append
    )
    return said


def encode_part(source: Path, out: Path, pretrained: Path | str, partitions: int, **options: Any) -> Preempted:
    """Encode as `encode` until so many partitions are finished, and then press Ctrl-C."""
    finish, finished = EncodeFolder.finish, itertools.count(1)

    def then_interrupt(
        folder: EncodeFolder, partition: int, record: PartitionRecord, metadata: PartitionMetadata
    ) -> None:
        finish(folder, partition, record, metadata)
        if next(finished) == partitions:
            raise KeyboardInterrupt

    with mock.patch.object(EncodeFolder, "finish", then_interrupt), pytest.raises(Preempted) as caught:
        encode(source, out, pretrained, **options)
    return caught.value


def files(folder: Path) -> dict[str, bytes]:
    """The contents of all files in a folder, hidden ones too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
