"""What the page is told of a run: thinned curves, only what is new, every state of a run."""

import io
import itertools
import json
import math
import os
import shutil
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from fastdiff.config.run_record import claim
from fastdiff.dashboard.folders import Folders
from fastdiff.dashboard.pictures import Picture, content
from fastdiff.dashboard.report import write_report
from fastdiff.dashboard.run_metadata import RunMetadata, glance, signature
from fastdiff.dashboard.series import Series
from fastdiff.dashboard.timeline import timeline
from fastdiff.errors import ConfigError
from fastdiff.ledger.reader import read_ledger
from tests.dashboard.folders import labelled_picture, ledger, lines, picture, record, run_folder, validation


def series(records: list[dict[str, Any]]) -> Series:
    found = Series()
    for one in records:
        found.add(one)
    return found


def test_few_records_are_shown_one_by_one() -> None:
    columns = series([record(step) for step in (1, 2, 4)]).thinned(1200)
    assert columns["step"] == {"mean": [1, 2, 4]}
    assert columns["loss"] == {"mean": [1, 0.5, 0.25]}


def test_many_records_become_buckets_that_keep_every_extreme() -> None:
    losses = [1.0] * 100_000
    losses[54_321], losses[7] = 900.0, 0.001
    found = series([{"step": n + 1, "loss": loss} for n, loss in enumerate(losses)]).thinned(1000)
    assert len(found["step"]["mean"]) == 1000
    assert found["step"]["mean"][-1] == 100_000
    assert max(found["loss"]["max"]) == 900
    assert min(found["loss"]["min"]) == 0.001
    assert math.fsum(found["loss"]["mean"]) * 100 == pytest.approx(math.fsum(losses), rel=1e-4)


def test_a_field_that_is_missing_or_no_number_is_null() -> None:
    found = series([{"step": 1}, {"step": 2, "loss": "much", "lr": 1}, {"step": 3, "loss": 10**400, "late": 4}])
    assert found.since(0) == {
        "step": {"mean": [1, 2, 3]},
        "lr": {"mean": [None, 1, None]},
        "loss": {"mean": [None, None, None]},
        "late": {"mean": [None, None, 4]},
    }


def test_a_mean_beyond_the_range_of_a_float_is_null() -> None:
    found = series([{"step": n, "loss": 1.7e308} for n in range(1, 101)]).thinned(10)
    assert found["loss"]["mean"] == [None] * 10
    assert json.dumps(found, allow_nan=False)


def test_a_thinned_bucket_without_a_value_is_null() -> None:
    found = series([{"step": n, "loss": 1.0 if n < 50 else None} for n in range(1, 101)]).thinned(10)
    assert found["loss"]["mean"][-1] is found["loss"]["max"][-1] is None


def test_a_page_gets_only_what_it_lacks(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", steps=range(1, 11))
    metadata = RunMetadata(folder)
    first = metadata.sections({})
    assert set(first) == {"about", "metrics", "validation", "events", "time", "pictures", "left_out"}
    have = {name: section["tag"] for name, section in first.items()}
    assert metadata.sections(have) == {}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(lines([record(11)]))
    more = metadata.sections(have)
    assert set(more) == {"metrics"}
    assert more["metrics"]["data"]["first"] == 10
    assert more["metrics"]["data"]["columns"]["step"]["mean"] == [11]


def test_a_page_gets_all_anew_after_a_resume_and_from_another_server(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", steps=range(1, 11))
    metadata = RunMetadata(folder)
    have = {name: section["tag"] for name, section in metadata.sections({}).items()}
    again = RunMetadata(folder).sections(have)
    assert set(again) == {"metrics"}
    assert again["metrics"]["data"]["first"] == 0
    (folder / "metrics.jsonl").write_text(lines(record(step) for step in (1, 2, 3)))
    found = metadata.sections(have)["metrics"]["data"]
    assert (found["first"], found["columns"]["step"]["mean"]) == (0, [1, 2, 3])


@pytest.mark.parametrize("have", ["", "x", "x:y", ":", "{g}:-1", "{g}:99", "{g}:0"])
def test_a_tag_that_is_none_gets_all(tmp_path: Path, have: str) -> None:
    metadata = RunMetadata(run_folder(tmp_path / "run"))
    generation = metadata.sections({})["metrics"]["tag"].partition(":")[0]
    assert metadata.sections({"metrics": have.format(g=generation)})["metrics"]["data"]["first"] == 0


def test_an_empty_folder_and_damaged_files_are_no_error(tmp_path: Path) -> None:
    metadata = RunMetadata(tmp_path)
    assert metadata.sections({})["about"]["data"] is None
    for name in ("run.json", "metrics.jsonl", "validation.jsonl", "ledger.jsonl", "spikes.jsonl"):
        (tmp_path / name).write_bytes(b'{"step": 1, \xff\n{"step": NaN, "event": []}\n')
    (tmp_path / "samples").write_text("a file")
    found = metadata.sections({})
    assert found["about"]["data"] is found["time"]["data"] is None
    assert json.dumps(found, allow_nan=False)


def test_pictures_are_those_of_the_folder_alone(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    picture(folder, 50)
    secret = tmp_path / "secret.png"
    shutil.copy(folder / "samples" / "step-00000050.png", secret)
    (folder / "samples" / "step-00000060.png").symlink_to(secret)
    (folder / "samples" / "step-00000070.png").write_text("no picture")
    os.mkfifo(folder / "samples" / "step-00000090.png")
    (folder / "samples" / "step-00000080.png.1-00000000.tmp").write_bytes(secret.read_bytes())
    metadata = RunMetadata(folder)
    found = metadata.sections({})["pictures"]["data"]
    assert [(one["step"], one["width"], one["height"]) for one in found] == [(50, 662, 530)]
    assert metadata.picture(60) is None
    (folder / "samples").rename(tmp_path / "elsewhere")
    (folder / "samples").symlink_to(tmp_path / "elsewhere")
    assert metadata.sections({})["pictures"]["data"] == [], "nor those of a linked folder"


def test_the_layout_of_a_picture_is_read_from_it_if_it_is_one(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    labelled_picture(folder, 50, ["a flower", "a temple"])
    [known] = RunMetadata(folder).sections({})["pictures"]["data"]
    layout = known["layout"]
    assert (layout["columns"], layout["side"], layout["pitch"]) == (("base", "step 50"), (128, 96), (130, 98))
    with Image.open(folder / "samples" / "step-00000050.png") as grid:
        for prompt, (x, y) in enumerate(layout["first"], 1):
            assert grid.getpixel((x, y)) == (40 * prompt, 40, 0)
            assert grid.getpixel((x + 130, y + 98)) == (40 * prompt, 80, 50)
        broken: tuple[Any, ...] = (
            "{", "[]", "[" * 100_000, {**layout, "first": [[1e308, 1], [2, 2]]}, {**layout, "first": [[-1, 0]]},
            {**layout, "side": [0, 96]}, {**layout, "side": "ab"}, {**layout, "first": []}, {**layout, "columns": 3},
            {**layout, "first": [[float("inf"), 0]]},
        )  # fmt: skip
        for step, text in enumerate(broken, 60):
            about = PngInfo()
            about.add_text("fastdiff-layout", text if isinstance(text, str) else json.dumps(text))
            grid.save(folder / "samples" / f"step-{step:08d}.png", pnginfo=about)
    found = RunMetadata(folder).sections({})["pictures"]["data"]
    assert [one["step"] for one in found if "layout" in one] == [50]
    assert len(found) == 1 + len(broken)


def test_the_spans_of_the_ledger_make_a_timeline_with_its_gap(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / "ledger.jsonl").write_text(lines(ledger()))
    sums = read_ledger(folder)
    found = timeline(sums)
    assert found[0]["began"] == 1000
    assert all(before["ended"] == after["began"] for before, after in itertools.pairwise(found))
    assert found[-1]["ended"] == 1081
    for name, seconds in sums.seconds.items():
        assert math.fsum(span["seconds"].get(name, 0) for span in found) == pytest.approx(seconds, abs=0.01)
    assert found[0]["seconds"]["step lost"] == pytest.approx(25 / 6, abs=0.01)
    assert found[0]["samples_per_s"] == pytest.approx(60 * 16 / 25, rel=1e-3)
    gaps = [span for span in found if span["samples_per_s"] is None]
    assert [max(span["seconds"], key=span["seconds"].get) for span in gaps] == ["unknown", "stop", "stop"]


def test_every_state_has_its_words(tmp_path: Path) -> None:
    node, mine = os.uname().nodename, os.getpid()
    folder = tmp_path / "run"
    assert glance(folder)["kind"] == "gone"
    folder.mkdir()
    assert glance(folder)["text"] == "no run has begun in this folder"
    release = claim(folder)
    assert glance(folder)["kind"] == "waiting"
    release()
    assert glance(folder)["kind"] == "failed", "the process lives, and trains no more"
    shutil.rmtree(folder)
    run_folder(folder, steps=())
    release = claim(folder)
    os.utime(folder / ".lock", (1000, 1000))  # as of a file server whose clock is late
    state = glance(folder)
    assert (state["kind"], state["steps"]) == ("waiting", 200)
    assert state["text"].endswith("no record yet: the first comes after step 10")
    before = signature(folder)
    (folder / "metrics.jsonl").write_text(lines([record(10)]))
    assert glance(folder)["kind"] == "running"
    assert glance(folder)["last"]["step"] == 10
    assert signature(folder) != before
    release()
    (folder / ".lock").write_text(f"process {2**22 + 1} on {node}")
    assert glance(folder)["kind"] == "failed"
    (folder / ".lock").write_text(f"process {mine} on elsewhere")
    assert glance(folder)["kind"] == "running"
    long_ago = time.time() - 7200
    for path in folder.iterdir():
        os.utime(path, (long_ago, long_ago))
    assert glance(folder)["kind"] == "silent"
    (folder / "ledger.jsonl").write_text(lines(ledger()))
    assert glance(folder)["kind"] == "done"
    (folder / "ledger.jsonl").write_text(lines(ledger()[:4]))
    assert glance(folder)["text"] == "ended: exit code 137; the same command begins anew: there is no checkpoint yet"
    (folder / "checkpoints" / "step-00000050").mkdir(parents=True)
    assert glance(folder)["text"] == "ended: exit code 137; the same command resumes from the newest checkpoint"
    told = {"message": "fastdiff: rank 1 (b, process 7) failed first: exit code 65: shard 3 is damaged"}
    (folder / "ledger.jsonl").write_text(lines([*ledger()[:3], ledger()[3] | {"code": 65} | told]))
    assert glance(folder)["message"] == "rank 1 (b, process 7) failed first: exit code 65: shard 3 is damaged"
    assert "; once its cause is mended, the same command resumes from the newest" in glance(folder)["text"]


def test_a_run_shorter_than_the_interval_of_its_log_is_told_its_first_record(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", steps=(), output={"log_every": 500}, samples=60 * 16)
    release = claim(folder)
    assert glance(folder)["text"].endswith("the first comes after step 60")
    release()


def test_runs_come_in_their_order_and_stay_when_they_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Folders([]).find() == {}, "runs/ may come later"
    for age, name in enumerate(("old", "middle", "new")):
        run_folder(tmp_path / "runs" / name)
        for path in (tmp_path / "runs" / name).iterdir():
            os.utime(path, (1000 + age, 1000 + age))
    assert [path.name for path in Folders([]).find().values()] == ["new", "middle", "old"]
    named = Folders([Path("runs/old"), Path("runs/new")])
    shutil.rmtree("runs/old")
    assert [path.name for path in named.find().values()] == ["old", "new"]
    Path("runs/unreadable").symlink_to("x" * 300)  # ENAMETOOLONG
    assert [path.name for path in Folders([Path("runs")]).find().values()] == ["new", "middle"]
    with pytest.raises(ConfigError, match="runs/nope: no folder of a run; runs there: middle, new"):
        Folders([Path("runs/nope")])


def test_validations_and_events_are_counted(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / "validation.jsonl").write_text(lines([validation(50, 0.5), validation(100, 0.4)]))
    (folder / "spikes.jsonl").write_text(lines([{"step": n, "loss": 9.0} for n in range(600)]))
    found = RunMetadata(folder).sections({})
    assert [one["val_loss"] for one in found["validation"]["data"]] == [0.5, 0.4]
    spikes = found["events"]["data"]["spikes"]
    assert (spikes["count"], len(spikes["last"]), spikes["last"][-1]["step"]) == (600, 500, 599)


def test_nothing_of_a_run_is_shown_with_credentials(tmp_path: Path) -> None:
    """Its files may be of a stranger, or of a version that wrote an address as it was given."""
    secret = "https://me:hunter2@host/x?token=hunter2"
    folder = run_folder(tmp_path / "run", data={"path": secret}, api_key="hunter2")
    (folder / "damaged.jsonl").write_text(lines([{"step": 1, "error": f"cannot read {secret}"}]))
    (folder / "validation.jsonl").write_text(lines([validation(50, 0.5) | {"data": secret}]))
    told = [{"message": f"shard 3 of {secret}"} if one["event"] == "end" else {} for one in ledger()]
    (folder / "ledger.jsonl").write_text(lines(one | more for one, more in zip(ledger(), told, strict=True)))
    write_report([folder], tmp_path / "page.html")
    shown = [
        json.dumps(RunMetadata(folder).sections({})),
        json.dumps(glance(folder)),
        (tmp_path / "page.html").read_text(),
    ]
    assert [text.count("hunter2") for text in shown] == [0, 0, 0]
    assert "https://host/x" in shown[0]


def test_a_start_in_a_slurm_job_has_no_throughput_before_its_first_step(tmp_path: Path) -> None:
    """Its nodes are held from ``job_start`` on, and until it has resumed, the step is that of the start before."""
    folder = run_folder(tmp_path / "run")
    records = ledger()
    records[4] |= {"submitted": 1035.0, "job_start": 1044.0}
    (folder / "ledger.jsonl").write_text(lines(records))
    second = [span for span in timeline(read_ledger(folder)) if span["start"] == 1]
    assert second[0]["began"] == 1044
    assert [(span["step"], span["samples_per_s"]) for span in second] == [
        (50, None),
        (100, pytest.approx(50 * 16 / 20, rel=1e-3)),
        (100, None),
    ]


def test_a_named_run_that_is_deleted_keeps_what_was_read(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    picture(folder, 50)
    (folder / "ledger.jsonl").write_text(lines(ledger()))
    metadata = RunMetadata(folder)
    before = metadata.sections({})
    shutil.rmtree(folder)
    assert metadata.sections({}) == before


def test_a_long_log_tells_how_far_its_reading_is(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", steps=range(1, 5001))
    size = (folder / "metrics.jsonl").stat().st_size
    metadata, told = RunMetadata(folder, slice_s=0), []
    while "reading" in (found := metadata.sections({})):
        told.append(found["reading"]["data"])
    assert [one["size"] for one in told] == [size] * len(told)
    assert told == sorted(told, key=lambda one: one["offset"])
    assert 0 < told[0]["offset"] < told[-1]["offset"] <= size
    assert found["metrics"]["data"] == RunMetadata(folder).sections({})["metrics"]["data"]


def test_pipes_in_the_place_of_files_are_not_waited_for(tmp_path: Path) -> None:
    for name in ("run.json", "metrics.jsonl", "ledger.jsonl", ".lock", "validation.jsonl"):
        os.mkfifo(tmp_path / name)
    assert glance(tmp_path)["last"]["step"] is None
    assert RunMetadata(tmp_path).sections({})["time"]["data"] is None
    assert signature(tmp_path) == signature(tmp_path)


def png(folder: Path, step: int, width: int, height: int, chunks: list[tuple[bytes, bytes]]) -> Picture:
    """Write a picture by its chunks, and return what the page knows of it."""
    (folder / "samples").mkdir(exist_ok=True)
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in [(b"IHDR", head), *chunks, (b"IEND", b"")]
    ]
    (folder / "samples" / f"step-{step:08d}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    found = RunMetadata(folder).picture(step)
    assert found is not None
    return found


def test_a_picture_that_would_cost_much_is_not_made_smaller(tmp_path: Path) -> None:
    """By its pixels, and by its chunks, each of which takes time; the file itself is still given."""
    data = zlib.compress(bytes(9 * 400))
    harmless = png(tmp_path, 1, 8, 400, [(b"IDAT", data)])
    assert content(harmless, 4)[1] == "image/webp"
    cut = png(tmp_path, 2, 8, 400, [(b"IDAT", b"")] * 5000 + [(b"IDAT", data)])
    with pytest.raises(ValueError, match="cut into more than"):
        content(cut, 4)
    large = png(tmp_path, 3, 2**13, 2**12 + 1, [(b"IDAT", data)])
    assert large.as_json()["whole"] is True
    with pytest.raises(ValueError, match=r"8,192 x 4,097 pixels in .* are not made smaller"):
        content(large, 4)
    assert content(large)[1] == "image/png"
    edge = png(tmp_path, 4, 2**13, 2**12, [(b"IDAT", data)])
    assert "whole" not in edge.as_json()


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "1"])
def test_a_thumbnail_has_the_colour_of_its_picture(tmp_path: Path, mode: str) -> None:
    """Also of pictures that somebody else drew: a palette has no mean, and WebP no single bits."""
    folder = run_folder(tmp_path / "run")
    (folder / "samples").mkdir(exist_ok=True)
    Image.new("RGB", (800, 400), (250, 250, 250)).convert(mode).save(folder / "samples" / "step-00000050.png")
    found = RunMetadata(folder).picture(50)
    assert found is not None
    with Image.open(io.BytesIO(content(found, 40)[0])) as small:
        assert small.size == (40, 20)
        assert min(small.convert("RGB").getpixel((20, 10))) > 230


def test_a_picture_beyond_the_limit_of_pixels_is_named_and_not_shown(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    picture(folder, 50)
    png(folder, 60, 2**14, 2**13, [])
    with pytest.raises(AssertionError):
        png(folder, 70, 2**14, 2**13 + 1, [])
    found = RunMetadata(folder).sections({})
    assert [one["step"] for one in found["pictures"]["data"]] == [50, 60]
    assert found["left_out"]["data"]["samples"] == [
        "step-00000070.png: 16,384 x 8,193 pixels, at most 134,217,728 are shown"
    ]


def test_a_thumbnail_is_made_once_until_its_picture_changes(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    path = picture(folder, 50)
    metadata = RunMetadata(folder)
    metadata.sections({})
    [first] = metadata.pictures
    small = content(first, 100)[0]
    path.unlink()
    assert content(first, 100)[0] is small
    picture(folder, 50, shade=10)
    metadata.sections({})
    assert content(metadata.pictures[0], 100)[0] != small
