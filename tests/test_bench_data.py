"""The benchmark of readers: every one gives each sample once per pass, and what they did is recorded."""

from __future__ import annotations

import hashlib
import multiprocessing
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import race, record
from bench.__main__ import main
from bench.readers import ours, page_cache, reading, rivals
from bench.readers.figures import READER
from bench.readers.samples import KINDS, Samples
from bench.turn import Turn
from fastdiff.data import dali_installed

READERS: dict[str, reading.Reader] = {
    READER: ours.reader,
    "fastdiff prefetch": ours.prefetch,
    "fastdiff dali": ours.dali,
    "dali webdataset": partial(rivals.dali, threads=2, mapped=True),
    "dali webdataset, not mapped": partial(rivals.dali, threads=2, mapped=False),
    "webdataset": partial(rivals.webdataset, workers=0),
    "webdataset 2 workers": partial(rivals.webdataset, workers=2),
    "npy dataloader": partial(rivals.npy_files, workers=0),
    "npy dataloader 2 workers": partial(rivals.npy_files, workers=2),
}
BATCH, COUNT = 4, 32


@pytest.fixture(scope="module", params=KINDS)
def samples(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Samples:
    folder = tmp_path_factory.mktemp("samples") / "samples"
    return Samples.write(folder, request.param, at_least=COUNT - 1, batch=BATCH, shards=2)


def digest(sample: dict[str, torch.Tensor]) -> str:
    """Of the arrays of a sample, as they were written: fastdiff's loaders give the latents as fp32."""
    names = sorted(sample)
    return hashlib.sha256(b"".join(name.encode() + sample[name].half().numpy().tobytes() for name in names)).hexdigest()


def read(reader: reading.Reader, samples: Samples, passes: int) -> list[str]:
    found = []
    for batch in reader(samples, torch.device("cpu"), passes):
        tensors = {name: torch.as_tensor(array) for name, array in batch.items()}
        assert {name: tuple(tensor.shape[1:]) for name, tensor in tensors.items()} == KINDS[samples.kilobytes]
        assert {len(tensor) for tensor in tensors.values()} == {BATCH}
        found += [digest({name: tensor[row] for name, tensor in tensors.items()}) for row in range(BATCH)]
    return found


@pytest.mark.parametrize("name", READERS)
def test_every_reader_gives_each_sample_once_per_pass_and_mixed(name: str, samples: Samples) -> None:
    if "dali" in name and not dali_installed():
        pytest.skip("DALI is not installed")
    files = [{n: samples.array(number, n) for n in samples.names} for number in range(samples.count)]
    written = [digest({n: torch.from_numpy(np.load(file)) for n, file in sample.items()}) for sample in files]
    assert len(set(written)) == COUNT
    found = read(READERS[name], samples, 3)
    assert Counter(found) == Counter(3 * written)
    if name != "webdataset 2 workers":  # which repeat their own shares
        assert Counter(found[:COUNT]) == Counter(written)
    assert found[:COUNT] != written


def test_samples_are_whole_shards_and_batches(samples: Samples) -> None:
    assert (samples.count, samples.per_shard, len(samples.tars)) == (COUNT, 2 * BATCH, COUNT // (2 * BATCH))
    assert abs(samples.sample_bytes - 1000 * samples.kilobytes) < 500
    assert samples.mixed % samples.per_shard == 0


def test_the_page_cache_is_emptied_and_looked_into(samples: Samples) -> None:
    for file in samples.files:
        file.read_bytes()
    assert page_cache.cached_share(samples.files) == 1.0
    page_cache.drop(samples.files)
    left = page_cache.cached_share(samples.files)
    if left == 1.0:
        pytest.skip("the files lie in memory")
    assert left == 0.0
    samples.files[0].read_bytes()
    assert 0.0 < page_cache.cached_share(samples.files) < 1.0


def burning(turn: Turn) -> None:
    """A contestant whose child takes 50 ms of processor time in every step."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        turn.ready()
        while True:
            pool.apply(_burn)
            turn.after_step()


def _burn() -> None:
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass


def test_processor_time_counts_the_processes_of_a_contestant() -> None:
    rounds: list[float] = []
    effort = race.Effort(rounds=2, steps=4, warm_up=1)
    result = race.race(
        [race.Contestant("burning", burning)], effort, device="cpu", before_turn=lambda: rounds.append(time.monotonic())
    )["burning"]
    assert result.failure is None
    assert len(rounds) == 2
    for turn in result.turns:
        assert 0.18 < turn.cpu_seconds < 0.5


def test_smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert main(["data", "--smoke", "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    (found,) = record.read_all([tmp_path / "out"])
    names = {name for name in READERS if "not mapped" not in name}
    values = {row.name[1:]: row.value for row in found.measurements}
    warm, cold = "151 KB samples, batch 8, warm", "151 KB samples, batch 8, cold"
    assert not [failure for failure in found.failures if failure.reason != "not installed"]
    for name in names - {failure.provider for failure in found.failures}:
        rate = values[warm, name, "throughput"]
        assert rate > 0
        assert values[warm, name, "bandwidth"] == pytest.approx(rate * 0.15104)
        assert values[warm, name, "cpu time"] > 0
        assert values[warm, name, "peak resident"] > 0.1
        assert name == READER or values[warm, f"{READER} over {name}", "speed-up"] > 0
    assert values[warm, "webdataset 2 workers", "peak resident"] > values[warm, "webdataset", "peak resident"]
    assert (cold, READER, "throughput") in values or cold in {failure.case for failure in found.failures}
    facts = {row.provider: row.facts for row in found.measurements if row.quantity == "throughput"}
    assert facts[READER]["crc32 checked"] is True
    assert facts["webdataset"]["crc32 checked"] is False
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
    assert warm in capsys.readouterr().out


def test_what_cannot_be_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--batch", "-1"], "--samples, --batch and --workers are 1 at least"),
        (["--samples", str(10**12)], "take fewer --samples, or set TMPDIR to a folder on another disk"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["data", "--smoke", "--device", "cpu", *arguments])
        assert message in capsys.readouterr().err
