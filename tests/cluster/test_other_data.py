"""A run folder that holds a run on other data, or another run: one message, before any advice on shapes."""

import shutil
from pathlib import Path

import pytest

import fastdiff
from fastdiff.cli.main import main
from fastdiff.config.run_record import as_json
from fastdiff.data.encoding.builtin import encode_synthetic
from fastdiff.errors import ConfigError
from fastdiff.parallel.world import World
from fastdiff.train import main as train_main
from fastdiff.training.loop import train
from tests.support.runs import flags, launch, tiny

STEPS = 2


@pytest.fixture(scope="module")
def first(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two data sets, and a finished run on one of them."""
    folder = tmp_path_factory.mktemp("two")
    encode_synthetic(folder / "small", shape=(1, 8, 8), samples=64, classes=10)
    encode_synthetic(folder / "large", shape=(3, 16, 16), samples=64, classes=4)
    encode_synthetic(folder / "equal", shape=(1, 8, 8), samples=96, classes=10)
    train(tiny(folder / "small", folder / "run", steps=STEPS), launch(), world)
    return folder


def words(first: Path, data: str, steps: int = STEPS, *more: str) -> list[str]:
    """Flags of a run on other data, as typed: the network is left to the data set."""
    given = flags(tiny(first / data, first / "run", steps=steps))
    return [*given, *more]


def other(first: Path) -> str:
    return (
        f"fastdiff: error: {first}/run is a run on {first}/small (step 2, done); give --output.folder {first}/NAME for"
    )


@pytest.mark.parametrize("data", ["large", "equal"])
@pytest.mark.parametrize("run", [lambda argv: main(["train", *argv]), train_main], ids=["fastdiff train", "train.py"])
def test_a_second_data_set_is_one_message(
    first: Path, data: str, run: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(run)
    assert run(words(first, data)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    going_on = "" if data == "large" else f", or go on with it on {first}/equal by --allow-change dataset"
    assert line == f"{other(first)} another{going_on}"


def test_obeying_advice_on_shapes_is_not_asked_for(first: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the network of the other data, and with a permission that the shapes make void."""
    shape = ["--model.channels", "3", "--model.size", "16", "--model.classes", "4"]
    for more in (shape, ["--allow-change", "dataset"], [*shape, "--allow-change", "dataset"]):
        assert main(["train", *words(first, "large", STEPS, *more)]) == 2
        assert capsys.readouterr().err.startswith(other(first)) == ("--allow-change" not in more or more[0] != shape[0])


def test_a_run_that_is_not_complete_and_data_encoded_again(
    first: Path, tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(first / "small", tmp_path / "data")
    config = tiny(tmp_path / "data", tmp_path / "run", steps=STEPS, output__checkpoint_every=1)
    train(config, launch(), world)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000002")
    shutil.rmtree(tmp_path / "data")
    shutil.copytree(first / "large", tmp_path / "data")
    assert main(["train", *flags(config)]) == 2
    said = capsys.readouterr().err
    assert f"is a run on {tmp_path}/data as it was before, with other content (step 1 of 2); give --output.fo" in said


def test_another_preset_in_the_folder_is_told_before_the_ranks(first: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--preset", "digits-adm", "--data.path", str(first / "small"), "--output.folder", str(first / "run")]
    assert main(["train", *argv]) == 2
    said = capsys.readouterr().err
    assert said.count("fastdiff:") == 1
    assert "(step 2, done) was started with another configuration:\n" in said
    assert '--model.kind: "dit" -> "adm"' in said
    assert said.endswith(f"\nchange it back, or give --output.folder {first}/NAME for another\n")
    assert main(["train", *words(first, "small", STEPS, "--seed", "3")]) == 2
    assert "for another, or accept it with --allow-change seed" in capsys.readouterr().err


def test_the_python_interface_says_it(first: Path) -> None:
    fields = as_json(tiny(first / "large", first / "run", steps=STEPS))
    with pytest.raises(ConfigError, match=r"run is a run on .*/small \(step 2, done\); give --output\.folder"):
        fastdiff.train(fastdiff.Config.from_dict(fields), ranks=1)
