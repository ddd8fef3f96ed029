"""Large sample sets: the same file from any number of ranks and after any kill; refusals."""

import fcntl
import itertools
import os
import re
import shutil
import signal
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from fastdiff.cli.main import main
from fastdiff.config.sections.ema import EmaConfig
from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.errors import ConfigError
from fastdiff.models.load import null_label
from fastdiff.parallel.launcher import Place, place_in_any_job
from fastdiff.parallel.world import World
from fastdiff.sampling.conditions import SampleRequest
from fastdiff.sampling.npz import read_npz
from fastdiff.sampling.npz_parts import NpzParts
from fastdiff.sampling.run import Run
from fastdiff.sampling.sample_set import SetOptions, draw_set, planned
from fastdiff.sampling.solvers import uniform_labels
from fastdiff.sampling.text import as_bytes
from fastdiff.training.loop import train
from tests.support.forked import fork_server, forked_ranks, values
from tests.support.injected.durable_calls import DURABLE, REMOVING, dying_at
from tests.support.nights import by_day
from tests.support.processes import BIN, Finished, run
from tests.support.runs import launch, tiny
from tests.support.scripts import COMMAND, run_job
from tests.support.waiting import LIMIT_S

IMAGES, BATCH = 1000, 64
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def trained(world: World, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(tiny(digits, folder, steps=2), launch(0), world)
    return folder


def draw(folder: Path, out: Path, rank: Place, num: int = IMAGES, batch: int = BATCH) -> None:
    """Draw as the command does, in four steps of DDIM."""
    run = Run(folder)
    draw_set(
        run, SampleRequest(num=num), SamplerConfig(steps=4), SetOptions(out=out, batch=batch), rank, say=lambda _: None
    )


@contextmanager
def interrupted(batches: int) -> Iterator[None]:
    """Press Ctrl-C when so many batches have been drawn."""
    claim, claimed = NpzParts.claim, itertools.count()

    def claim_or_interrupt(parts: NpzParts, number: int) -> bool:
        if next(claimed) == batches:
            raise KeyboardInterrupt
        return claim(parts, number)

    with mock.patch.object(NpzParts, "claim", claim_or_interrupt), pytest.raises(KeyboardInterrupt):
        yield


def draw_part(folder: Path, out: Path, batches: int, num: int = IMAGES, batch: int = BATCH) -> None:
    with interrupted(batches):
        draw(folder, out, Place(), num, batch)


def test_an_unfinished_set_of_an_earlier_version_goes_on(trained: Path, tmp_path: Path) -> None:
    """Its plan has these fields alone."""
    run = Run(trained)
    request, options = SampleRequest(num=IMAGES), SetOptions(out=tmp_path / "set.npz")
    of_sampler = {"scheduler", "steps", "respacing", "cfg", "cfg_channels", "clip", "seed"}
    found = planned(run, request, SamplerConfig(steps=4), options).plan.keys()
    assert found == {"checkpoint", "weights", "classes", "images", "batch", "precision", "autoencoder", *of_sampler}
    newer = SamplerConfig(steps=4, cfg=1.5, cfg_interval=(0.1, 0.9))
    assert "cfg_interval" in planned(run, request, newer, options).plan


def flags(folder: Path, out: Path) -> list[str]:
    """The same, as a command."""
    return ["sample", str(folder), "--num", str(IMAGES), "--batch", str(BATCH), "--steps", "4", "--npz", str(out)]


@pytest.fixture(scope="module")
def undisturbed(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "out.npz"
    draw(trained, out, Place())
    return out


# ---- the same file -------------------------------------------------------------------------------------


def drawn_by(world: World, folder: Path, out: Path) -> bool:
    draw(folder, out, place_in_any_job())
    return out.exists()


def drawn_in_bf16(world: World, folder: Path, out: Path) -> torch.dtype:
    run = Run(folder)
    options = SetOptions(out=out, batch=8, precision="bf16")
    draw_set(run, SampleRequest(num=40), SamplerConfig(steps=4), options, place_in_any_job(), say=lambda _: None)
    return next(run.model.parameters()).dtype


@pytest.mark.parametrize("ranks", by_day([3], 2))
def test_any_number_of_ranks_writes_the_same_file(trained: Path, undisturbed: Path, tmp_path: Path, ranks: int) -> None:
    out = tmp_path / "new" / "out.npz"
    finished = values(forked_ranks(drawn_by, trained, out, ranks=ranks))
    assert any(finished), "the last one joins the parts"
    assert out.read_bytes() == undisturbed.read_bytes()
    assert [path.name for path in out.parent.iterdir()] == ["out.npz"]


def test_bf16_draws_the_same_file_in_any_number_of_ranks(trained: Path, tmp_path: Path) -> None:
    files = []
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}.npz"
        assert values(forked_ranks(drawn_in_bf16, trained, out, ranks=ranks)) == [torch.bfloat16] * ranks
        files.append(out.read_bytes())
    assert files[0] == files[1]
    draw(trained, tmp_path / "fp32.npz", Place(), num=40, batch=8)
    lossy, exact = (read_npz(tmp_path / name)[0].astype(int) for name in ("1.npz", "fp32.npz"))
    assert 0 < abs(lossy - exact).mean() < 4, "rounded, and the same images"


def test_every_image_is_that_of_its_number_and_class(trained: Path, undisturbed: Path) -> None:
    images, labels = read_npz(undisturbed)
    assert images.shape == (IMAGES, 8, 8, 1)
    assert labels is not None
    assert torch.equal(torch.from_numpy(labels), uniform_labels(0, range(IMAGES), 10))
    run = Run(trained)
    null = {"label": null_label(run.config.model)}
    for index in (range(128), range(900, IMAGES)):
        condition = {"label": torch.from_numpy(labels[index.start : index.stop])}
        drawing = SamplerConfig(steps=4, cfg=1.5, clip=True)
        latents = run.sample(condition, null, drawing, first_index=index.start, batch=7, progress=False)
        expected = as_bytes(latents).permute(0, 2, 3, 1).numpy().astype(int)
        assert abs(images[index.start : index.stop] - expected).max() <= 1
    assert len(np.unique(images.reshape(IMAGES, -1), axis=0)) == IMAGES


def test_the_file_is_laid_out_as_adm_reads_it(undisturbed: Path) -> None:
    with np.load(undisturbed, allow_pickle=False) as found:
        assert sorted(found) == ["arr_0", "arr_1"]
        assert (found["arr_0"].dtype, found["arr_1"].dtype) == (np.uint8, np.int64)
        assert found["arr_0"].std() > 10
    with zipfile.ZipFile(undisturbed) as archive:
        assert archive.testzip() is None
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


# ---- killed and resumed --------------------------------------------------------------------------------


def killed_at(world: World, folder: Path, out: Path, number: int) -> None:
    """Draw until the call of this number that makes something durable or visible, or removes it, and die before it."""
    with dying_at(number, DURABLE | REMOVING):
        draw(folder, out, Place(), num=20, batch=10)


@pytest.mark.fault(9)
def test_killed_at_every_durable_call_it_writes_the_same_file(trained: Path, tmp_path: Path, nightly: bool) -> None:
    """Each one anew, and then the same command once more."""
    draw(trained, tmp_path / "undisturbed.npz", Place(), num=20, batch=10)
    expected = (tmp_path / "undisturbed.npz").read_bytes()
    out = tmp_path / "out.npz"
    # Plan, a part, and what joins and removes them; the second part only at night.
    for number in itertools.count(1) if nightly else (1, 2, 3, 5, 6, 10, 11, 12, 13, 15):
        ended = forked_ranks(killed_at, trained, out, number, ranks=1)[0].code
        if nightly and ended == 0:
            assert number > 15
            break
        assert ended == -signal.SIGKILL
        draw(trained, out, Place(), num=20, batch=10)
        assert out.read_bytes() == expected
        assert [path.name for path in tmp_path.glob("out*")] == ["out.npz"]
        out.unlink()


def test_a_process_alone_draws_all_whatever_the_variables_of_a_job_say(
    trained: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also parts of others that it does not see, as on a network file system that shows new files late."""
    out, parts = tmp_path / "out.npz", tmp_path / "out.npz.parts"
    draw_part(trained, out, 5)
    (parts / "part-000002").unlink()
    for name, value in (("RANK", "7"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    assert main(flags(trained, out)) == 0
    assert out.read_bytes() == undisturbed.read_bytes()
    assert not parts.exists()


def test_a_batch_that_another_process_holds_is_waited_for(trained: Path, tmp_path: Path) -> None:
    out, said = tmp_path / "out.npz", []
    draw_part(trained, out, 1, num=40, batch=10)
    other = (tmp_path / "out.npz.parts" / "part-000002.lock").open("wb")
    fcntl.flock(other, fcntl.LOCK_EX)

    def say(text: str) -> None:
        said.append(text)
        other.close()

    run = Run(trained)
    draw_set(run, SampleRequest(num=40), SamplerConfig(steps=4), SetOptions(out=out, batch=10), Place(), say=say)
    waits = "rank 0: waiting for 10 images that other processes draw"
    assert said == [waits, f"{out}: 40 images, {run.description}"]


def test_a_complete_set_is_not_drawn_again(trained: Path, undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    shutil.copyfile(undisturbed, out)
    before, said = out.stat().st_mtime_ns, []
    draw_set(
        Run(trained),
        SampleRequest(num=IMAGES),
        SamplerConfig(steps=4),
        SetOptions(out=out, batch=BATCH),
        Place(1, 2),
        say=said.append,
    )
    assert said == [f"{out} is complete already"]
    assert out.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("place", "code", "message"),
    [
        ("{}/file/x.npz", 74, "file/x.npz: Not a directory; a file stands where its path needs a folder"),
        ("{}", 2, ": a folder, expected the name of a file to write"),
        ("/", 2, "/: a folder, expected the name of a file to write"),
    ],
)
def test_a_set_where_no_file_can_be_made_is_refused(
    trained: Path, tmp_path: Path, capsys: Any, place: str, code: int, message: str
) -> None:
    (tmp_path / "file").touch()
    assert main(flags(trained, Path(place.format(tmp_path)))) == code
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("names", [["mine"], ["lock", "part-000000"]])
def test_a_folder_of_the_user_stays(
    trained: Path, undisturbed: Path, tmp_path: Path, capsys: Any, names: list[str]
) -> None:
    """Beside a set that is to be drawn, which is refused, and beside one that is complete."""
    out, mine = tmp_path / "out.npz", tmp_path / "out.npz.parts"
    mine.mkdir()
    for name in names:
        (mine / name).write_text("years of work")
    assert main(flags(trained, out)) == 2
    assert f"{mine} exists and is not of fastdiff" in capsys.readouterr().err
    assert not out.exists()
    shutil.copyfile(undisturbed, out)
    assert main(flags(trained, out)) == 0
    assert "is complete already" in capsys.readouterr().out
    assert sorted(path.name for path in mine.iterdir()) == names
    assert all((mine / name).read_text() == "years of work" for name in names)


def test_a_set_that_another_rank_finishes_during_the_start_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank removes the folder, plan and all, after its files have been listed."""
    listdir = os.listdir

    def begin() -> NpzParts:
        return NpzParts(tmp_path / "out.npz", {"images": 4}, (4, 2, 2, 1), 4, None)

    def overtaken(folder: Path) -> list[str]:
        names = listdir(folder)
        monkeypatch.undo()
        assert other.join() == 0
        return names

    other = begin()
    assert other.claim(0)
    other.write(0, np.zeros((4, 2, 2, 1), np.uint8))
    monkeypatch.setattr(os, "listdir", overtaken)
    assert begin().complete


# ---- refused -------------------------------------------------------------------------------------------


OTHER_SETTINGS = [
    (["--seed", "1"], "seed: 0 there, 1 now"),
    (["--steps", "5"], "steps: 4 there, 5 now"),
    (["--scheduler", "ddpm"], "scheduler: ddim there, ddpm now"),
    (["--cfg", "2"], "cfg: 1.5 there, 2.0 now"),
    (["--cfg-channels", "1"], "cfg_channels: None there, 1 now"),
    (["--no-clip-denoised"], "clip: True there, False now"),
    (["--num", "999"], "images: 1000 there, 999 now"),
    (["--batch", "32"], "batch: 64 there, 32 now"),
    (["--precision", "bf16"], "precision: fp32 there, bf16 now"),
    (["--classes", "0-3"], r"classes: drawn from all 10 there, drawn from \[0, 1, 2, 3\] now"),
    (["--ema", "0.5"], r"weights: step 2, EMA of rate 0.9 there, step 2, EMA of rate 0.5 now"),
]


@pytest.mark.parametrize(
    ("changed", "message", "begun"),
    [
        # By day each of them once.
        pytest.param(*setting, begun, marks=() if begun == number % 2 else pytest.mark.nightly)
        for number, setting in enumerate(OTHER_SETTINGS)
        for begun in (True, False)
    ],
)
def test_other_settings_do_not_go_on(
    trained: Path, undisturbed: Path, tmp_path: Path, capsys: Any, changed: list[str], message: str, begun: bool
) -> None:
    out = tmp_path / "out.npz"
    if begun:
        draw_part(trained, out, 0)
        assert [path.name for path in tmp_path.iterdir()] == ["out.npz.parts"]
    else:
        shutil.copyfile(undisturbed, out)
    assert main([*flags(trained, out), *changed]) == 2
    error = capsys.readouterr().err
    conflict = "samples of another plan" if begun else "exists, drawn with another plan"
    assert re.search(rf"{conflict} \({message}\)", error), error
    assert "choose another --npz" in error
    assert begun or [path.name for path in tmp_path.iterdir()] == ["out.npz"]


def test_a_set_replaces_another_one_when_it_is_complete(trained: Path, undisturbed: Path, tmp_path: Path) -> None:
    """Until then the earlier one stays; a file of someone else always."""
    out = tmp_path / "out.npz"
    shutil.copyfile(undisturbed, out)
    fewer = SetOptions(out=out, batch=16, overwrite=True)

    def begin() -> None:
        draw_set(Run(trained), SampleRequest(num=40), SamplerConfig(steps=4), fewer, Place(), say=lambda _: None)

    with interrupted(2):
        begin()
    assert out.read_bytes() == undisturbed.read_bytes()
    begin()
    draw(trained, tmp_path / "alone.npz", Place(), num=40, batch=16)
    assert out.read_bytes() == (tmp_path / "alone.npz").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone.npz", "out.npz"]
    out.write_bytes(b"my thesis")
    with pytest.raises(ConfigError, match="was not written by fastdiff"):
        begin()
    assert out.read_bytes() == b"my thesis"


def test_an_average_made_from_other_snapshots_does_not_go_on(
    world: World, digits: Path, tmp_path: Path, capsys: Any
) -> None:
    """The run may save further ones meanwhile; without one that is lost it would be another average."""
    folder, out = tmp_path / "run", tmp_path / "out.npz"
    ema = EmaConfig(rates=(), power_stds=(0.05, 0.1), snapshot_every=2)
    train(tiny(digits, folder, steps=12, ema=ema, output__checkpoint_every=8), launch(0), world)
    snapshots = sorted((folder / "ema").iterdir())
    assert [path.name[-2:] for path in snapshots] == ["02", "04", "06", "08", "10", "12"]
    for path in snapshots[4:]:
        path.rename(tmp_path / path.name)
    begun = Run(folder, ema_std=0.07, step=8)
    with interrupted(2):
        draw_set(begun, SampleRequest(num=40), SamplerConfig(steps=4), SetOptions(out=out, batch=16), Place())
    for path in snapshots[4:]:
        (tmp_path / path.name).rename(path)
    assert Run(folder, ema_std=0.07, step=8).description == begun.description
    command = ["sample", str(folder), "--ema-std", "0.07", "--step", "8", "--num", "40", "--batch", "16"]
    command += ["--steps", "4", "--npz", str(out)]
    snapshots[2].rename(tmp_path / "lost")
    assert main(command) == 2
    made_from = r"made from 8 of digest \w{12}\) there, .* made from 6 of digest \w{12}\) now"
    assert re.search(rf"samples of another plan \(weights: .*{made_from}", capsys.readouterr().err)
    (tmp_path / "lost").rename(snapshots[2])
    assert main(command) == 0
    assert len(read_npz(out)[0]) == 40


@pytest.mark.parametrize("content", [b"my thesis", None], ids=["text", "npz"])
def test_a_foreign_file_is_not_replaced(trained: Path, tmp_path: Path, content: bytes | None) -> None:
    out = tmp_path / "out.npz"
    if content is None:
        np.savez(out, np.zeros(3))
    else:
        out.write_bytes(content)
    before = out.read_bytes()
    with pytest.raises(ConfigError, match="exists and was not written by fastdiff; choose another --npz"):
        draw(trained, out, Place())
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--npz", "out.npz"], "--npz: give the number of images by --num, --per-class, --prompt or --low-res"),
        (["--num", "5"], "--num is for --npz FILE or --pngs FOLDER; give one of them"),
        (["--autoencoder", "identity"], "--autoencoder is for --npz FILE or --pngs FOLDER; give one of them"),
        (["--npz", "out.npz", "--num", "5", "--per-class", "5"], "--num and --per-class both set the number"),
        (["--npz", "out.npz", "--num", "5", "--classes", "8-11"], "the model was trained with classes 0-9"),
        (["--npz", "out.npz", "--prompt", "a cat"], "trained with classes, not captions"),
        (["--npz", "out.npz", "--low-res", "base.npz"], "was not trained to enlarge images; leave it out"),
        (["--npz", "out.npz", "--num", "5", "--cfg-channels", "2"], "choose 1 to 1, the channels"),
        (["--npz", "out.npz", "--num", "5", "--scheduler", "heun"], "integrates the velocity of flow, and the model"),
        (["--npz", "out.npz", "--num", "5", "--cfg", "1", "--cfg-channels", "1"], "no guidance with --cfg 1; give"),
        (["--npz", "out.npz", "--num", "5", "--step", "1"], "no checkpoint of step 1; there are 2"),
        (["--npz", "out.npz", "--num", "5", "--autoencoder", "nowhere/at-all"], "nowhere/at-all"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    trained: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, options: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["sample", str(trained), *options]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("out.npz*"))


# ---- classes, numbers and memory -----------------------------------------------------------------------


def test_the_number_of_images_of_each_class(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    assert (
        main(["sample", str(trained), "--classes", "7,2", "--per-class", "3", "--steps", "2", "--npz", str(out)]) == 0
    )
    images, labels = read_npz(out)
    assert labels is not None
    assert labels.tolist() == [7, 2, 7, 2, 7, 2]
    assert len(images) == 6


def test_pixels_are_clamped_unless_it_is_turned_off(trained: Path, tmp_path: Path) -> None:
    files = {}
    for name, flag in {"default": [], "on": ["--clip-denoised"], "off": ["--no-clip-denoised"]}.items():
        out = tmp_path / f"{name}.npz"
        assert main(["sample", str(trained), "--num", "20", "--steps", "5", "--npz", str(out), *flag]) == 0
        files[name] = read_npz(out)[0]
    assert np.array_equal(files["default"], files["on"])
    assert not np.array_equal(files["default"], files["off"])


@pytest.fixture
def joining(tmp_path: Path) -> tuple[NpzParts, int]:
    """64 MiB of images, all drawn."""
    shape = 1024, 128, 128, 4
    parts = NpzParts(tmp_path / "out.npz", {"images": 1024}, shape, 16, None)
    for batch in range(parts.batches):
        assert parts.claim(batch)
        parts.write(batch, np.full((16, *shape[1:]), batch, np.uint8))
    return parts, 2**26


def _peak_of_join(parts: NpzParts) -> int:
    tracemalloc.start()
    assert parts.join() == 0
    return tracemalloc.get_traced_memory()[1]


def test_joining_needs_no_memory_for_the_images(joining: tuple[NpzParts, int], tmp_path: Path) -> None:
    """In a process of its own, where no other thread allocates."""
    parts, size = joining
    with ProcessPoolExecutor(1, fork_server()) as process:
        assert process.submit(_peak_of_join, parts).result(LIMIT_S) < size / 4
    images = read_npz(tmp_path / "out.npz")[0]
    assert images.nbytes == size
    assert [int(image.max()) for image in images[::16]] == list(range(64))


def test_an_image_that_is_not_finite_is_no_sample(trained: Path, tmp_path: Path) -> None:
    run = Run(trained)
    with torch.no_grad():
        next(run.model.parameters()).fill_(float("nan"))
    with pytest.raises(ConfigError, match="image 0 is not finite, with the weights of step 2"):
        draw_set(run, SampleRequest(num=4), SamplerConfig(steps=2), SetOptions(out=tmp_path / "out.npz"), Place())


def by_torchrun(*given: str | Path) -> Finished:
    return run([BIN / "torchrun", "--standalone", "--nproc-per-node", "2", "--no-python", "--", "fastdiff", *given])


def by_forks(*given: str | Path) -> Finished:
    return run_job(COMMAND, *given, ranks=2)


@pytest.mark.parametrize("launched", [by_forks, pytest.param(by_torchrun, marks=pytest.mark.nightly)])
def test_the_command_is_told_to_all_ranks_by_a_launcher(
    trained: Path, tmp_path: Path, launched: Callable[..., Finished]
) -> None:
    out = tmp_path / "out.npz"
    done = launched("sample", trained, "--num", "40", "--batch", "16", "--steps", "2", "--npz", out)
    assert done.code == 0, done.output
    assert "40 images, step 2, EMA of rate 0.9" in done.output
    assert len(read_npz(out)[0]) == 40
