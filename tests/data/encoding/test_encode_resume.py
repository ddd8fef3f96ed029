"""Encodes that are killed and resumed, in processes of their own."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastdiff.data.encoding.builtin import encode_digits
from fastdiff.data.shards.verify import verify
from fastdiff.errors import ConfigError
from fastdiff.models.pretrained.tiny_pipeline import build
from tests.support.encode_ranks import CALLS, begin, finish, killed
from tests.support.forked import fork_server
from tests.support.inputs.encoding import captioned, files
from tests.support.nights import by_day

IMAGES, PER_SHARD = 24, 2


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """``fastdiff encode`` of 12 partitions, one of which loses an image, without OUT."""
    folder = tmp_path_factory.mktemp("encode")
    build(folder / "pipeline")
    sizes = [(32, 32), (32, 64), (64, 32)]
    captions = [f"picture {number % 7}" for number in range(IMAGES)]
    images = captioned(folder / "images", captions, [sizes[number % 5 % 3] for number in range(IMAGES)])
    (images / "017.png").write_bytes((images / "017.png").read_bytes()[:200])
    options = {
        "pretrained": folder / "pipeline", "resolution": 32, "bucket-step": 16, "samples-per-shard": PER_SHARD,
        "batch": 2, "decode": "pillow", "workers": 1, "bad": "skip", "statistics": "measured",
    }  # fmt: skip
    flags = [f"--{name}={value}" for name, value in options.items()]
    return ["encode", str(images), "--buckets", "--flip", *flags]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Any]:
    """Starts processes that have imported everything: a kill shall hit the encode, not the imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield fork_server()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, command: list[str], ranks: Any) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    assert finish(begin(ranks, command, out, 1)) == [0]
    assert not verify(out).problems
    return files(out)


@pytest.mark.fault(9)
@pytest.mark.parametrize("count", by_day([3], 2, 1))
def test_killed_again_and_again_it_writes_the_same_bytes(
    tmp_path: Path, command: list[str], ranks: Any, undisturbed: dict[str, bytes], count: int, nightly: bool
) -> None:
    """At random calls, a different one on each rank: in the first partition of a start, and once in its second one."""
    for trial in range(6 if nightly else 1):
        out, calls = tmp_path / f"out{trial}", random.Random(count + 2 * trial)
        for low, high in ((1, CALLS), (CALLS + 2, 2 * CALLS), (1, CALLS)):
            numbers = [calls.randrange(low, high) for _ in range(count)]
            assert killed(ranks, command, out, numbers) == [-9] * count
            assert not (out / "dataset.json").exists()
        kept = len(list((out / ".encoding").glob("unit-*.json")))
        assert 0 < kept < IMAGES // PER_SHARD
        assert finish(begin(ranks, command, out, count)) == [0] * count
        assert files(out) == undisturbed
    assert "bad_images.jsonl" in undisturbed


@pytest.mark.nightly
@pytest.mark.fault(9)
def test_killed_at_every_durable_call_it_writes_the_same_bytes(
    tmp_path: Path, command: list[str], ranks: Any, undisturbed: dict[str, bytes]
) -> None:
    """Each start dies one call later than the one before it: the calls of four partitions."""
    out, published = tmp_path / "out", False
    for number in range(1, 4 * CALLS + 1):
        if published:
            assert finish(begin(ranks, command, out, 1)) == [0]  # removes what is left if it died after publishing
            assert files(out) == undisturbed
            shutil.rmtree(out)
        ended, published = killed(ranks, command, out, [number]), (out / "dataset.json").exists()
        assert ended == [-9] or published
    assert finish(begin(ranks, command, out, 1)) == [0]
    assert files(out) == undisturbed


def test_digits_do_not_go_where_images_are_being_encoded(tmp_path: Path) -> None:
    (tmp_path / ".encoding").mkdir()
    with pytest.raises(ConfigError, match="an unfinished encode of images"):
        encode_digits(tmp_path)
