"""``bench data``: every reader gives each sample once per pass, and the record has their figures."""

import contextlib
import hashlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from fastdiff_bench.__main__ import main
from fastdiff_bench.commands import data
from fastdiff_bench.measure import interleaved
from fastdiff_bench.measure.session import Memory, Steps, StepTimer
from fastdiff_bench.readers import other_libraries, ours, page_cache, reading
from fastdiff_bench.readers.figures import READER, Case, Heat
from fastdiff_bench.readers.samples import KINDS, Samples
from fastdiff_bench.records import record
from fastdiff_bench.records.record import Log
from tests.support.forked import fork_server
from tests.support.processes import start, stop

READERS: dict[str, reading.Reader] = {
    READER: ours.reader,
    "fastdiff prefetch": ours.prefetch,
    "fastdiff dali": ours.dali,
    "dali webdataset": partial(other_libraries.dali, threads=2, mapped=True),
    "dali webdataset, not mapped": partial(other_libraries.dali, threads=2, mapped=False),
    "webdataset": partial(other_libraries.webdataset, workers=0),
    "webdataset 2 workers": partial(other_libraries.webdataset, workers=2),
    "npy dataloader": partial(other_libraries.npy_files, workers=0),
    "npy dataloader 2 workers": partial(other_libraries.npy_files, workers=2),
}
BATCH, COUNT = 4, 32


@pytest.fixture(scope="module", params=KINDS)
def samples(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Samples:
    folder = tmp_path_factory.mktemp("samples") / "samples"
    return Samples.write(folder, request.param, at_least=COUNT - 1, batch=BATCH, shards=2)


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """A small process: readers fork their workers, and one that has run many tests may be too large to be copied."""
    with ProcessPoolExecutor(1, fork_server()) as executor:
        yield executor


def digest(sample: dict[str, torch.Tensor]) -> str:
    """Of the arrays of a sample, as they were written: fastdiff's loaders give the latents as fp32."""
    names = sorted(sample)
    return hashlib.sha256(b"".join(name.encode() + sample[name].half().numpy().tobytes() for name in names)).hexdigest()


def read(name: str, samples: Samples, passes: int) -> list[str]:
    found = []
    for batch in READERS[name](samples, torch.device("cpu"), passes):
        tensors = {name: torch.as_tensor(array) for name, array in batch.items()}
        assert {name: tuple(tensor.shape[1:]) for name, tensor in tensors.items()} == KINDS[samples.kilobytes]
        assert {len(tensor) for tensor in tensors.values()} == {BATCH}
        found += [digest({name: tensor[row] for name, tensor in tensors.items()}) for row in range(BATCH)]
    return found


@pytest.mark.parametrize("name", READERS)
def test_every_reader_gives_each_sample_once_per_pass_and_mixed(
    name: str, samples: Samples, process: ProcessPoolExecutor
) -> None:
    files = [{n: samples.array(number, n) for n in samples.names} for number in range(samples.count)]
    written = [digest({n: torch.from_numpy(np.load(file)) for n, file in sample.items()}) for sample in files]
    assert len(set(written)) == COUNT
    found = process.submit(read, name, samples, 3).result(timeout=120)
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
    assert page_cache.empty(samples.files) == 0.0
    samples.files[0].read_bytes()
    assert 0.0 < page_cache.cached_share(samples.files) < 1.0


@pytest.mark.parametrize(
    ("heat", "reason"),
    [
        (
            "cold",
            "100% of the files were in the page cache at the start of a session; set TMPDIR to a folder on a disk",
        ),
        ("warm", "0% of the files were in the page cache at the start of a session; take fewer --samples"),
    ],
)
def test_a_cache_that_is_not_as_the_case_has_it_is_a_failure_at_once(
    heat: Heat, reason: str, samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, Log(tmp_path / "data.jsonl") as log:
        if heat == "cold":
            # What is in memory stays there, however often its eviction is tried.
            monkeypatch.setattr(page_cache, "empty", partial(page_cache.empty, limit_seconds=0.0))
            shutil.copytree(samples.folder, Path(memory) / "samples")
            samples = replace(samples, folder=Path(memory) / "samples")
        else:
            page_cache.empty(samples.files)
        assert not data.measure(Case(samples, 1, heat, "cpu"), 2, log)
    found = record.read(log.path)
    assert found.measurements == ()
    assert [(failure.provider, failure.reason) for failure in found.failures] == [("page cache", reason)]


@pytest.mark.parametrize("reader", [ours.reader, ours.prefetch])
def test_every_pass_of_fastdiff_opens_the_shards_anew(
    reader: reading.Reader, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only so the kernel is asked again to stream them in."""
    asked: list[int] = []
    advise = os.posix_fadvise

    def noted(descriptor: int, offset: int, length: int, advice: int) -> None:
        asked.append(advice)
        advise(descriptor, offset, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", noted)
    for number, _ in enumerate(reader(samples, torch.device("cpu"), 3), 1):
        if number % (COUNT // BATCH) == 0:
            passes = number // (COUNT // BATCH)
            assert asked.count(os.POSIX_FADV_WILLNEED) >= passes * len(samples.tars)
            if reader is ours.reader:  # which reads nothing ahead
                assert asked.count(os.POSIX_FADV_WILLNEED) == passes * len(samples.tars)


def session(*seconds: float) -> Steps:
    return Steps(list(seconds), {}, cpu_seconds=sum(seconds))


@pytest.mark.parametrize(("ahead", "mean"), [(0, 2.0), (1, 8 / 3), (8, 3.5)])
def test_only_what_was_read_ahead_does_not_count(
    ahead: int, mean: float, samples: Samples, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = interleaved.Result([session(0.0, 1.0, 3.0, 4.0)] * 2, {"read ahead": ahead, "workers' memory": 2**30})
    result.memory = Memory(resident=2**30)
    with Log(tmp_path / "data.jsonl") as log:
        Case(samples, 1, "cold", "cpu").report({READER: result}, 0.004, log)
    rows = {row.quantity: row for row in record.read(log.path).measurements}
    assert rows["throughput"].value == pytest.approx(BATCH / mean)
    assert rows["cpu time"].value == pytest.approx(1e6 * 8.0 / 4 / BATCH)
    assert rows["throughput"].facts["cached"] == 0.004
    assert rows["peak resident"].value == 2.0
    assert "high-water mark" in str(rows["peak resident"].facts["resident"])


def burning(timer: StepTimer) -> None:
    """A program whose child takes 50 ms of processor time in every step."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        timer.ready()
        while True:
            pool.apply(_burn)
            timer.after_step()


def _burn() -> None:
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass


def test_processor_time_counts_the_processes_of_a_program() -> None:
    rounds: list[float] = []
    effort = interleaved.Effort(rounds=2, steps=4, warm_up=1)
    result = interleaved.run_interleaved(
        [interleaved.Program("burning", burning)],
        effort,
        device="cpu",
        before_session=lambda: rounds.append(time.monotonic()),
    )["burning"]
    assert result.failure is None
    assert len(rounds) == 2
    for session in result.sessions:
        assert 0.18 < session.cpu_seconds < 1.0, "without the imports of the process"


@pytest.mark.nightly
def test_smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = {name for name in READERS if "not mapped" not in name}
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert main(["data", "--smoke", "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    (found,) = record.read_all([tmp_path / "out"])
    assert found.failures == ()
    values = {row.name[1:]: row.value for row in found.measurements}
    warm, cold = "151 KB samples, batch 8, warm", "151 KB samples, batch 8, cold"
    for name in names:
        rate = values[warm, name, "throughput"]
        assert rate > 0
        assert values[warm, name, "bandwidth"] == pytest.approx(rate * 0.15104)
        assert values[warm, name, "cpu time"] > 0
        assert values[warm, name, "peak resident"] > 0.1
        assert name == READER or values[warm, f"{READER} over {name}", "speed-up"] > 0
    assert values[warm, "webdataset 2 workers", "peak resident"] > values[warm, "webdataset", "peak resident"]
    assert values[cold, READER, "throughput"] > 0
    facts = {row.provider: row.facts for row in found.measurements if row.quantity == "throughput"}
    assert facts[READER]["crc32 checked"] is True
    assert facts["webdataset"]["crc32 checked"] is False
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
    assert warm in capsys.readouterr().out


@pytest.mark.nightly
def test_an_interrupted_bench_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fastdiff_bench", "data", "--smoke", "--device", "cpu", "--out", tmp_path / "out"]
    process = start(command, TMPDIR=str(tmp_path))
    try:
        until = time.monotonic() + 120
        while not (started := programs_of(process.pid)):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        assert list(tmp_path.glob("fastdiff-bench-*"))
        process.terminate()
        process.communicate(timeout=120)
        assert process.returncode == 128 + signal.SIGTERM
        assert not psutil.wait_procs(started, timeout=120)[1]
        assert not list(tmp_path.glob("fastdiff-bench-*"))
    finally:
        stop(process)


def programs_of(process: int) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(process).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a command that the bench ran, and that has ended
            if "spawn_main" in " ".join(child.cmdline()):
                found.append(child)
    return found


def test_impossible_options_are_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--batch", "0"], "--samples, --batch and --workers must be at least 1"),
        (["--samples", "0"], "--samples, --batch and --workers must be at least 1"),
        (["--rounds", "1"], "--rounds at least 2"),
        (["--samples", str(10**12)], "take fewer --samples, or set TMPDIR to a folder on another disk"),
    ):
        assert main(["data", "--smoke", "--device", "cpu", *arguments]) == 2
        assert message in capsys.readouterr().err
