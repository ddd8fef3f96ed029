"""Values that no run can have are refused before anything is written out, opened or drawn."""

from dataclasses import replace
from pathlib import Path

import pytest

from fastdiff.cli.main import main
from fastdiff.cluster.launchers.hostfile import read_hostfile
from fastdiff.config.arguments import types as argument_types
from fastdiff.config.presets import preset
from fastdiff.config.sections.data import DataConfig
from fastdiff.data.images.options import SourceOptions
from fastdiff.data.images.sources import open_source
from fastdiff.data.shards.cache import ShardCache
from fastdiff.errors import ConfigError


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The message of a command line with a wrong value."""
    assert main(argv) == 2
    return capsys.readouterr().err


@pytest.mark.fault(28)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--per-class", "1000000000000"], "a whole number from 1 to 2147483647"),
        (["--per-class", "9" * 5000], "a whole number from 1 to 2147483647"),
        (["--steps", "0"], "a whole number from 1 to 2147483647"),
        (["--grid", "g.xyz"], "expected the name of a picture, with .png"),
        (["--grid", "g.bmp"], "expected the name of a picture, with .png"),
        (["--grid", "folder.png"], "a folder, expected the name of a picture in it"),
    ],
)
def test_sample_refuses_what_it_could_not_draw_or_write(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the run is opened, which is not there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    assert message in refused(["sample", "nothing", *flags], capsys)


@pytest.mark.parametrize("text", ["-1", "1.5", str(2**64), "9" * 5000, "", "seven"])
@pytest.mark.parametrize("command", ["sample", "evaluate"])
def test_a_seed_has_the_bounds_of_that_of_a_run(command: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused([command, "nothing", "--seed", text], capsys)
    assert f"error: --seed: {text[:30]}: expected a whole number from 0 to 2**64 - 1" in said
    largest = 2**64 - 1
    assert replace(preset("digits"), seed=argument_types.seed(str(largest))).seed == largest


def test_numbers_of_threads_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["encode", "nothing", "out", "--autoencoder", "identity", "--workers", "99999999"]
    assert "from 1 to 1024" in refused(argv, capsys)
    with pytest.raises(ConfigError, match=r"--data\.workers 99999999: 1 to 1024"):
        DataConfig(online=True, workers=99_999_999)


def test_shapes_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["encode", "synthetic", "out", "--shape", "99999,99999,99999"]
    assert "expected C,H,W" in refused(argv, capsys)
    assert argument_types.shape("4,128,128") == (4, 128, 128)


@pytest.mark.fault(28)
@pytest.mark.parametrize(
    "text", ["{0..99999999999}.tar", "{a,b}" * 40 + ".tar", "{a..z}" * 12 + ".tar", "{0..9999}{0..9999}.tar"]
)
def test_braces_that_stand_for_too_many_names_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="its braces stand for"):
        open_source(SourceOptions(source=text))


def test_braces_of_many_shards_are_read(tmp_path: Path) -> None:
    """Also written one by one: 30 names are 30, and not two to their power."""
    from fastdiff.data.images.sources import _expanded

    assert len(_expanded("{00000..99999}.tar")) == 100_000
    assert len(_expanded("{" + ",".join(map(str, range(30))) + "}.tar")) == 30


def test_an_address_that_is_none_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"http://\*\*\*: not an address"):
        ShardCache("http://[::1/x", tmp_path)
    with pytest.raises(ConfigError, match=r"http://\*\*\*: not an address"):
        open_source(SourceOptions(source="http://[::1/x"))


@pytest.mark.fault(28)
@pytest.mark.parametrize("path", ["/dev/zero", "/proc/self/mem"])
def test_a_hostfile_is_read_up_to_a_limit(path: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_hostfile(Path(path))
