"""Sample sets as folders of PNG files: names, pixels, resuming, several ranks, and files of someone else."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fastdiff.cli.main import main
from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.models.pretrained.tiny_pipeline import build
from fastdiff.parallel.launcher import place_in_any_job
from fastdiff.parallel.world import World
from fastdiff.sampling.conditions import SampleRequest
from fastdiff.sampling.npz import read_npz
from fastdiff.sampling.run import Run
from fastdiff.sampling.sample_set import SetOptions, draw_set
from fastdiff.training.loop import train
from tests.support.forked import forked_ranks, values
from tests.support.inputs.text_runs import encode, text_run
from tests.support.runs import FRUIT, launch, named, tiny

NAMES = ("../a b", "naïve, 花", "???", *FRUIT[3:])
WORDS = ("a-b", "naïve-花", "class-2", *FRUIT[3:])
"""The same in the names of files."""


@pytest.fixture(scope="module")
def trained(world: World, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pngs")
    train(tiny(named(digits, folder / "data", NAMES), folder / "run", steps=2), launch(0), world)
    return folder / "run"


def command(run: Path, *where: str | Path) -> list[str]:
    return ["sample", str(run), "--num", "40", "--batch", "16", "--steps", "2", *map(str, where)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def drawn_by(world: World, run: Path, out: Path) -> None:
    """Draw the set of ``command``."""
    options = SetOptions(out=out, pngs=True, batch=16)
    draw_set(Run(run), SampleRequest(num=40), SamplerConfig(steps=2), options, place_in_any_job())


def test_every_image_of_a_set_is_a_file_of_its_number_and_class(trained: Path, tmp_path: Path, capsys: Any) -> None:
    """The pixels are those of the npz; lost files are drawn again, by any number of ranks; files of others stay."""
    out = tmp_path / "new" / "pngs"
    assert main(command(trained, "--npz", tmp_path / "set.npz")) == 0
    assert main(command(trained, "--pngs", out)) == 0
    images, labels = read_npz(tmp_path / "set.npz")
    assert labels is not None
    names = [f"{number:06d}-{WORDS[label]}.png" for number, label in enumerate(labels)]
    before = contents(out)
    assert sorted(before) == names
    for name, image in zip(names, images, strict=True):
        with Image.open(out / name) as picture:
            assert np.array_equal(np.asarray(picture), image.squeeze(2))

    (out / names[20]).unlink()
    (out / names[3]).rename(out / f"{names[3]}.12-0123abcd.tmp")  # as a killed process leaves it
    kept = {name: (out / name).stat().st_mtime_ns for name in names[32:]}
    values(forked_ranks(drawn_by, trained, out, ranks=2))
    assert contents(out) == before
    assert {name: (out / name).stat().st_mtime_ns for name in kept} == kept, "what was drawn is not drawn again"
    assert main(command(trained, "--pngs", out)) == 0
    assert "is complete already" in capsys.readouterr().out

    assert main([*command(trained, "--pngs", out), "--seed", "1"]) == 2
    said = capsys.readouterr().err
    assert f"{out} has images drawn with another plan, such as {names[0]} (seed: 0 there, 1 now)" in said
    assert "or replace what is there by --overwrite" in said
    Image.new("L", (8, 8)).save(out / names[7])
    (out / "mine.png").write_text("not of the set")
    foreign = contents(out)
    assert main(command(trained, "--pngs", out)) == 2
    assert f"{names[7]} exists and was not written by fastdiff; choose another --pngs" in capsys.readouterr().err
    assert contents(out) == foreign


def test_a_set_that_replaces_another_one(trained: Path, tmp_path: Path, capsys: Any) -> None:
    """The images of the other plan go, also those beyond a smaller set; again the same command has nothing to do."""
    out = tmp_path / "pngs"
    assert main(command(trained, "--pngs", out)) == 0
    (out / "mine.png").write_text("not of the set")
    fewer = [*command(trained, "--pngs", out), "--num", "24", "--seed", "1", "--overwrite"]
    assert main(fewer) == 0
    assert main([*command(trained, "--pngs", tmp_path / "alone"), "--num", "24", "--seed", "1"]) == 0
    assert contents(out) == contents(tmp_path / "alone") | {"mine.png": b"not of the set"}
    capsys.readouterr()
    assert main(fewer) == 0
    assert "is complete already" in capsys.readouterr().out


def test_a_folder_of_someone_else_is_refused_before_the_work(trained: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "photos").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "photos" / "000123.png")
    for overwrite in ([], ["--overwrite"]):
        assert main([*command(trained, "--pngs", tmp_path / "photos"), *overwrite]) == 2
        assert "photos: the folder holds nothing of this command, but 000123.png; name" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["000123.png"]


def test_images_of_prompts_are_named_by_the_number_of_the_prompt(world: World, tmp_path: Path, capsys: Any) -> None:
    encode(tmp_path / "data", build(tmp_path / "sd15", kind="sd15"))
    train(text_run(tmp_path / "data", tmp_path / "sd15", tmp_path / "run", steps=1), launch(1), world)
    prompts = ["--prompt", "a red cat", "--prompt", "zwei Vögel", "--steps", "1", "--pngs", str(tmp_path / "out")]
    assert main(["sample", str(tmp_path / "run"), *prompts, "--num", "3"]) == 2
    assert "set the number of images with --per-prompt" in capsys.readouterr().err
    assert main(["sample", str(tmp_path / "run"), *prompts, "--per-prompt", "2"]) == 0
    expected = [f"{number:06d}-prompt-{number % 2}.png" for number in range(4)]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == expected
    with Image.open(tmp_path / "out" / expected[0]) as picture:
        assert picture.mode == "RGB"
