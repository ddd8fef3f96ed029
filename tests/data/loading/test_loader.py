"""The two loaders: the same batches, the same errors, no threads left."""

import itertools
import re
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.presets import preset
from fastdiff.config.sections.data import DataConfig
from fastdiff.data import dali_trial
from fastdiff.data.loading import build
from fastdiff.data.loading.build import build_batches
from fastdiff.data.loading.order import Order
from fastdiff.data.loading.training_set import open_data
from fastdiff.data.shards.format import Column, DatasetInfo, Normalisation, Provenance
from fastdiff.data.shards.index import ShardIndex
from fastdiff.data.shards.reader import LatentReader
from fastdiff.data.shards.writer import ShardWriter
from fastdiff.errors import ConfigError, DataError

LOADERS = ("dali", "prefetch")
SHIFT, SCALE = (0.25, -1.0), (2.0, 0.18215)
SAMPLES = 40
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def encode(folder, *, classes, dtype="float16"):
    template = DatasetInfo(
        columns={"latent": Column(dtype=dtype, shape=(2, 4, 4))},
        normalisation=Normalisation(shift=SHIFT, scale=SCALE),
        provenance=Provenance(source="test", transform="none"),
        classes=classes,
    )
    values = np.random.default_rng(0).standard_normal((SAMPLES, 2, 4, 4)).astype(dtype)
    with ShardWriter(folder, template, samples_per_shard=9) as writer:
        for number in range(SAMPLES):
            label = None if classes is None else number % classes
            writer.add(f"{number:09d}", {"latent": values[number]}, label)
    return values


@pytest.fixture
def latents(tmp_path):
    values = encode(tmp_path / "latents", classes=11)
    with LatentReader(tmp_path / "latents") as reader:
        yield reader, Order(5, reader.shard_sizes, 2), values


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = threading.enumerate()
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not [name for name in left if name.startswith("fastdiff-")]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return torch.device(request.param)


def batches(reader, order, loader, *, device=CPU, start=0, rank=0, ranks=1, micro=6, batch=12, prefetch=4):
    return build_batches(
        reader,
        order,
        config=DataConfig(loader=loader, prefetch=prefetch),
        seed=5,
        device=device,
        start_samples=start,
        rank=rank,
        ranks=ranks,
        micro=micro,
        global_batch=batch,
    )


def take(count, *args, **kwargs):
    with batches(*args, **kwargs) as stream:
        return list(itertools.islice(stream, count))


@pytest.mark.parametrize("prefetch", [1, 2, 5])
@pytest.mark.parametrize("loader", LOADERS)
def test_batches_are_the_normalised_samples_at_their_positions(latents, loader, prefetch, device):
    reader, order, values = latents
    taken = take(15, reader, order, loader, prefetch=prefetch, device=device)
    for index, batch in enumerate(taken):
        positions = np.arange(index * 6, index * 6 + 6)
        ids = order.samples(positions)
        shift = np.array(SHIFT, np.float32)[:, None, None]
        scale = np.array(SCALE, np.float32)[:, None, None]
        expected = (values[ids].astype(np.float32) - shift) * scale
        assert batch.latents.dtype == torch.float32
        assert {part.device.type for part in (batch.latents, batch.position, batch.condition["label"])} == {device.type}
        assert np.array_equal(batch.latents.cpu().numpy(), expected)
        assert batch.position.dtype == batch.condition["label"].dtype == torch.int64
        assert batch.position.tolist() == positions.tolist()
        assert batch.condition["label"].tolist() == (ids % 11).tolist()


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_unconditional_data_has_no_label(tmp_path, loader, dtype, device):
    encode(tmp_path, classes=None, dtype=dtype)
    with LatentReader(tmp_path) as reader:
        [batch] = take(1, reader, Order(0, reader.shard_sizes, 1), loader, device=device)
    assert batch.condition == {}
    assert batch.latents.shape == (6, 2, 4, 4)


@pytest.mark.parametrize("prefetch", [1, 4])
@pytest.mark.parametrize("loader", LOADERS)
def test_a_damaged_sample_is_a_data_error_at_its_micro_batch(latents, loader, prefetch, device):
    reader, order, _ = latents
    shard, row = (int(part[0]) for part in order.locate(order.samples([3 * 6 + 2])))
    path = reader.folder / reader.info.shards[shard].name
    place = ShardIndex.from_bytes(path.with_suffix(".index.json").read_bytes()).place("latent.npy", row)
    with path.open("r+b") as file:
        file.seek(place.offset + 130)
        file.write(b"\x99\x99")
    with batches(reader, order, loader, prefetch=prefetch, device=device) as stream:
        for index in range(3):
            assert next(stream).position[0] == index * 6
        for _ in range(2):
            with pytest.raises(DataError, match=rf"{path.name}, key {place.key}.*offset {place.offset}: crc32"):
                next(stream)


@pytest.mark.parametrize("loader", LOADERS)
def test_batches_stay_as_they_are(latents, loader, device):
    reader, order, _ = latents
    with batches(reader, order, loader, device=device) as stream:
        first = next(stream)
        tensors = (first.latents, first.position, first.condition["label"])
        copies = [tensor.clone() for tensor in tensors]
        list(itertools.islice(stream, 20))
        assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))


@pytest.mark.parametrize("prefetch", [1, 2, 4])
@pytest.mark.parametrize("loader", LOADERS)
def test_reading_ahead_is_bounded(latents, loader, prefetch, monkeypatch, device):
    reader, order, _ = latents
    reads = []
    read = reader.read
    monkeypatch.setattr(reader, "read", lambda *args, **choice: reads.append(1) or read(*args, **choice))
    with batches(reader, order, loader, prefetch=prefetch, device=device) as stream:
        list(itertools.islice(stream, 10))
        until = time.monotonic() + 120
        while len(reads) < 10 + prefetch and time.monotonic() < until:
            time.sleep(0.01)
        stream._thread.join(0.2)  # time for one read too many
        assert len(reads) == 10 + prefetch


@pytest.mark.parametrize("loader", LOADERS)
def test_closing_ends_the_thread_at_any_time(latents, loader, device):
    reader, order, _ = latents
    batches(reader, order, loader, device=device).close()
    for count in (1, 3):
        with batches(reader, order, loader, device=device) as stream:
            list(itertools.islice(stream, count))
        stream.close()
        with pytest.raises(RuntimeError, match=r"closed"):
            next(stream)


def test_auto_takes_dali_where_it_works(latents, monkeypatch):
    reader, order, _ = latents
    with batches(reader, order, "auto") as stream:
        assert stream.name == "dali"
    monkeypatch.setattr(dali_trial, "dali_installed", lambda: False)
    monkeypatch.setattr(build, "dali_problem", dali_trial.dali_problem.__wrapped__)  # tries again
    with batches(reader, order, "auto") as stream:
        assert stream.name == "prefetch"
        assert next(stream).latents.shape == (6, 2, 4, 4)
    with pytest.raises(ConfigError, match=r"pip install 'nvidia-dali-cuda130"):
        batches(reader, order, "dali")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"loader": "prefetch", "prefetch": 0}, "--data.prefetch 0"),
        ({"loader": "prefetch", "start": 5}, "multiple of --batch.samples"),
        ({"loader": "dali", "micro": 5}, "is not divisible"),
    ],
)
def test_wrong_settings_are_refused(latents, change, problem):
    reader, order, _ = latents
    with pytest.raises(ConfigError, match=problem):
        batches(reader, order, **change)


def test_a_run_keeps_two_windows_of_shards_open(tmp_path):
    encode(tmp_path, classes=11)
    model = DiTConfig(depth=1, hidden=32, heads=2, patch=2, channels=2, size=4, classes=11)
    config = replace(preset("digits"), model=model, data=DataConfig(path=str(tmp_path), shuffle_shards=70))
    with open_data(config, CPU) as reader:
        assert reader.open_shards == 140


def test_a_thread_that_hangs_is_left_with_a_warning(latents, monkeypatch, capsys):
    reader, order, _ = latents
    monkeypatch.setattr("fastdiff.data.loading.batches._JOIN_SECONDS", 0.05)
    stream, reading, hanging = batches(reader, order, "prefetch"), threading.Event(), threading.Event()
    monkeypatch.setattr(reader, "read", lambda *_, **__: (reading.set(), hanging.wait(600)))
    stream._thread.start()
    assert reading.wait(120)
    try:
        stream.close()
        said = capsys.readouterr().err
        assert re.search(rf"WARNING the thread fastdiff-prefetch did not end .* storage of {reader.folder}", said)
    finally:
        hanging.set()
        stream._thread.join()
    assert stream._thread.daemon


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [1, 4])
@pytest.mark.parametrize("loader", LOADERS)
def test_memory_of_a_dropped_batch_is_not_used_again_before_its_consumer_is_done(latents, loader, prefetch):
    reader, order, _ = latents
    expected = take(20, reader, order, loader)
    results, consumer = [], torch.cuda.Stream()
    with torch.cuda.stream(consumer), batches(reader, order, loader, device=CUDA, prefetch=prefetch) as stream:
        for batch in itertools.islice(stream, len(expected)):
            # The GPU reads this batch long after the host has dropped it and the thread has made the next ones.
            torch.cuda._sleep(20_000_000)
            results.append((batch.latents.clone(), batch.position.clone(), batch.condition["label"].clone()))
            del batch
    consumer.synchronize()
    for found, batch in zip(results, expected, strict=True):
        for tensor, wanted in zip(found, (batch.latents, batch.position, batch.condition["label"]), strict=True):
            assert torch.equal(tensor.cpu(), wanted)
