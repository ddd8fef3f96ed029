"""Images of a user's code: encoded as any other source, and refused if an item does not follow from its number."""

from pathlib import Path

import numpy as np
import pytest

from fastdiff.data.encoding.images import encode_images
from fastdiff.data.encoding.options import EncodeOptions
from fastdiff.data.images.options import SourceOptions
from fastdiff.data.images.sources import open_source
from fastdiff.data.shards.format import DatasetInfo
from fastdiff.data.shards.reader import LatentReader
from fastdiff.errors import ConfigError, DataError

SQUARES = """
import numpy as np
from PIL import Image

class Own:
    classes = 2
    class_names = ("dark", "bright")

    def __len__(self):
        return 20

    def __getitem__(self, i):
        image = np.full((8, 8, 3), 7 * i, np.uint8)
        return {"image": Image.fromarray(image) if i % 3 else image, "label": i % 2}
"""


def source(tmp_path: Path, content: str) -> str:
    (tmp_path / "own.py").write_text(content)
    return f"{tmp_path / 'own.py'}:Own"


def test_items_become_samples_in_order(tmp_path: Path) -> None:
    options = EncodeOptions(
        source=source(tmp_path, SQUARES),
        out=tmp_path / "out",
        autoencoder="identity",
        resolution=8,
        samples_per_shard=6,
    )
    encode_images(options, say=lambda text: None)
    info = DatasetInfo.read(tmp_path / "out")
    assert (info.samples, info.classes, len(info.shards)) == (20, 2, 4)
    with LatentReader(tmp_path / "out") as reader:
        read = reader.read(np.arange(20))
    assert [int(image.max()) for image in read["latent"]] == [7 * i for i in range(20)]
    assert [int(label) for label in read["label"]] == [i % 2 for i in range(20)]


def test_the_identity_follows_from_the_code(tmp_path: Path) -> None:
    first = open_source(SourceOptions(source=source(tmp_path, SQUARES), samples_per_shard=4))
    again = open_source(SourceOptions(source=source(tmp_path, SQUARES), samples_per_shard=4))
    other = open_source(SourceOptions(source=source(tmp_path, SQUARES + "#"), samples_per_shard=4))
    assert first.digest == again.digest != other.digest
    assert len(open_source(SourceOptions(source=source(tmp_path, SQUARES), samples_per_shard=4, max_samples=3))) == 3


def test_captions_and_paths(tmp_path: Path) -> None:
    content = SQUARES.replace('"label": i % 2', '"caption": ["a", "b"]')
    found = open_source(SourceOptions(source=source(tmp_path, content), samples_per_shard=4))
    assert found.captioned
    assert (found.classes, found.partitions, found.most_captions(0)) == (None, 5, 2)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("7 * i, np.uint8", "np.random.randint(255), np.uint8", "is another image, label or caption when it is read"),
        ('"label": i % 2', '"lable": 3', "a dict of image, lable, expected a dict with an image"),
        ('"label": i % 2', '"label": 5', "its label is 5, expected 0 to 1"),
        ("classes = 2", "classes = None", "it needs an attribute classes"),
        ('("dark", "bright")', '("dark",)', "1 class_names for 2 classes"),
        ("np.uint8)", "np.float32)", "its image is float32 (8, 8, 3), expected uint8"),
        ("return 20", "return 0", "it has no items"),
        ("image = np", "image = 1 / 0 or np", "own.py:13: ZeroDivisionError"),
    ],
)
def test_what_breaks_a_promise_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises((ConfigError, DataError)) as caught:
        open_source(SourceOptions(source=source(tmp_path, SQUARES.replace(old, new)), samples_per_shard=4))
    assert message in str(caught.value)
