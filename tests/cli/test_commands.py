"""The commands of the README, as a user types them."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import fastdiff
from fastdiff.checkpoint.manifest import committed
from fastdiff.cli.machines import doctor
from fastdiff.cli.machines.doctor import examine
from fastdiff.cli.main import main
from fastdiff.config.presets import preset
from fastdiff.parallel.world import World
from fastdiff.train import main as train_main
from fastdiff.training.loop import train
from tests.support.forked import forked_ranks, values
from tests.support.processes import ROOT, deepspeed
from tests.support.runs import flags, launch, losses, newest, records, tiny, train_losses
from tests.support.scripts import deepspeed_with_forks


def test_two_gloo_ranks_train_the_preset(digits: Path, tmp_path: Path, nightly: bool) -> None:
    """By night DeepSpeed's launcher and its ranks start Python anew."""
    short = ["--samples", "256", "--data.path", digits, "--output.folder", tmp_path / "run", "--output.log_every", "2"]
    short += ["--output.sample_steps", "2"]
    zero3 = ["--deepspeed_config", "deepspeed_configs/zero3.json"]
    start = deepspeed if nightly else deepspeed_with_forks
    done = start("--preset", "digits", *short, *zero3, ranks=2, TORCH_EXTENSIONS_DIR=str(tmp_path / "compiled"))
    assert done.code == 0, done.output
    assert not (tmp_path / "compiled").exists(), "a start compiles nothing"
    assert [r["step"] for r in records(tmp_path / "run")] == [2, 4]
    saved = committed(tmp_path / "run" / "checkpoints")[0]
    assert {p.name for p in saved.glob("rank-*")} == {"rank-00000.safetensors", "rank-00001.safetensors"}
    assert (tmp_path / "run" / "samples" / "step-00000004.png").exists()
    assert_only_the_start_is_said(done.output)


def assert_only_the_start_is_said(output: str) -> None:
    """The ranks alone: what DeepSpeed's launcher says is its own."""
    lines = [line for line in output.replace("\r", "\n").splitlines() if line.strip()]
    own = [line for line in lines if not re.search(r"\[(launch|runner)\.py:", line) and not re.match(r"run: +\d", line)]
    told = [line for line in own if re.match(r"\d\d:\d\d:\d\d \[rank 0\] INFO ", line)]
    subjects = [found[0] for line in told if (found := re.search("parameters|drawing|: done", line))]
    assert subjects == ["parameters", "drawing", ": done"], told
    own = [line for line in own if line not in told and not line.startswith("  ")]
    assert len([line for line in own if "get_accelerator" not in line]) == 0, output
    assert len(own) <= 2, "of the command and its launcher, none of the ranks"


@pytest.fixture(scope="module")
def trained(world: World, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, which tests only read."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(tiny(digits, folder, steps=2), launch(), world)
    return folder


def test_run_json_tells_what_ran(world: World, digits: Path, tmp_path: Path) -> None:
    config = tiny(digits, tmp_path / "run", steps=1)
    train(config, launch(3, argv=("--preset", "digits")), world)
    found = json.loads((tmp_path / "run" / "run.json").read_text())
    assert found["argv"] == ["--preset", "digits"]
    assert found["config"]["model"]["hidden"] == 32
    assert found["deepspeed"]["train_batch_size"] == 16
    assert found["versions"]["deepspeed"]


def test_sample_and_evaluate(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    png = tmp_path / "grid.png"
    options = ["--scheduler", "dpmsolver++", "--steps", "5", "--cfg", "1.5", "--classes", "0-2,7", "--per-class", "3"]
    assert main(["sample", str(trained), *options, "--grid", str(png)]) == 0
    assert "step 2, EMA of rate 0.9" in capsys.readouterr().out
    width, height = Image.open(png).size
    assert round(width / height, 1) == round(4 / 3, 1), "four columns, three rows"

    assert main(["evaluate", str(trained)]) == 0
    result = json.loads((trained / "evaluation.json").read_text())
    assert result.keys() == {"accuracy", "frechet_distance", "samples"}
    assert result["samples"] == 500
    assert result["accuracy"] < 0.5, "two steps teach nobody to write"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scheduler", "euler"], "ddim"),
        (["--classes", "8-12"], "trained with classes 0-9"),
        (["--classes", "zero"], "trained with classes 0-9, which have no names; give them as 0-9 or 1,5,7"),
        (["--classes", "9-0"], "give them as 0-9 or 1,5,7"),
        (["--per-class", "0"], "expected a whole number from 1 to"),
        (["--ema", "0.123"], "no EMA of rate 0.123"),
    ],
)
def test_a_wrong_sample_option_exits_2(
    trained: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert exit_code(["sample", str(trained), *options]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def exit_code(arguments: list[str]) -> int:
    """Of the ``fastdiff`` command, in this process."""
    try:
        return main(arguments)
    except SystemExit as stopped:
        return int(stopped.code or 0)


def test_evaluating_other_data_is_refused(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["encode", "synthetic", str(tmp_path / "noise"), "--shape", "1,8,8", "--samples", "64"]) == 0
    config = tiny(tmp_path / "noise", tmp_path / "run", steps=1, model__classes=1000)
    train(config, launch(), world)
    assert main(["evaluate", str(tmp_path / "run")]) == 2
    assert "only for digits" in capsys.readouterr().err


def test_the_grid_of_a_run_does_not_depend_on_the_ranks(world: World, digits: Path, tmp_path: Path) -> None:
    changes = {"steps": 2, "output__sample_every": 2, "output__sample_steps": 3, "batch__micro": 8}
    train(tiny(digits, tmp_path / "one", **changes), launch(0), world)
    values(forked_ranks(train_losses, tiny(digits, tmp_path / "two", **changes), launch(3)))
    one, two = (np.asarray(Image.open(tmp_path / n / "samples" / "step-00000002.png"), int) for n in ("one", "two"))
    assert one.shape == two.shape
    assert abs(one - two).max() <= 1


def test_dry_run_prints_and_writes_nothing(
    world: World, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_main([*flags(tiny(digits, tmp_path / "run")), "--dry-run"]) == 0
    said = capsys.readouterr().out
    printed = json.loads(said[said.index("{\n") : said.rindex("}") + 1])
    assert printed["config"]["output"]["folder"] == str(tmp_path / "run")
    assert printed["deepspeed"]["train_batch_size"] == 16
    assert not (tmp_path / "run").exists()


def test_a_finished_run_started_again_is_done_at_once(world: World, digits: Path, tmp_path: Path) -> None:
    config = tiny(digits, tmp_path / "run", steps=2)
    train(config, launch(), world)
    before = newest(tmp_path / "run").manifest["files"]
    train(config, launch(), world)
    assert newest(tmp_path / "run").manifest["files"] == before
    train(tiny(digits, tmp_path / "run", steps=1), launch(), world)  # fewer than it has
    assert newest(tmp_path / "run").manifest["files"] == before
    assert len(losses(tmp_path / "run")) == 2


def test_doctor_steps_every_optimizer() -> None:
    healthy = list(examine())
    assert any(line.startswith("torch ") for line in healthy)
    (libraries,) = [line for line in healthy if line.startswith("OK libraries: ")]
    for name in ("adamw8bit", "adamw8bit-bnb"):
        assert f"optimizer {name}: runs, its state is 8-bit" in libraries
    assert "optimizer adamw: runs, its state is 32-bit" in libraries


@pytest.fixture
def enough_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if /dev/shm were large; in a container it has 64 MB, which is a problem of its own."""
    monkeypatch.setattr(doctor, "_shared_memory", lambda: iter(()))


@pytest.mark.parametrize(("free_gib", "problems"), [(0.06, 1), (0.49, 1), (0.51, 0), (8.0, 0)])
def test_doctor_finds_little_shared_memory(monkeypatch: pytest.MonkeyPatch, free_gib: float, problems: int) -> None:
    usage = SimpleNamespace(free=int(free_gib * 2**30))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage if path == "/dev/shm" else None)
    found = list(doctor._shared_memory())
    message = f"PROBLEM: /dev/shm has {free_gib:.1f} GiB free, ranks talk through it; give the container --shm-size 8g"
    assert found == [message] * problems


@pytest.mark.usefixtures("enough_shared_memory")
def test_doctor_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--preset", "digits"]) == 0
    said = capsys.readouterr().out
    assert "data loader: DALI" in said
    assert [line.split(":")[0] for line in said.splitlines()[-3:]] == ["OK device", "OK compilers", "OK libraries"]
    assert "loader DALI; attention sdpa (" in said
    assert "\033" not in said, "colours are for a terminal"
    assert "preset digits on cpu, fp32, blocks eager:" in said
    assert "blocks.0-3.attn  attention  sdpa (" in said


def test_doctor_names_what_a_gpu_cannot_do() -> None:
    """Each with its remedy, by plain values; a preset in fp32 needs no bf16."""
    t4 = list(doctor._of_device("device 0, Tesla T4", (7, 5), ["sm_75", "sm_80"], None))
    assert t4 == [
        "PROBLEM: device 0, Tesla T4: this GPU (sm_75) has no bf16 arithmetic, which begins with sm_80; torch emulates "
        "it; use --performance.precision fp16"
    ]
    assert not list(doctor._of_device("device 0, Tesla T4", (7, 5), ["sm_75"], preset("digits")))
    (v100,) = doctor._of_device("device 0, V100", (7, 0), ["sm_75"], preset("digits"))
    assert v100.startswith("PROBLEM: device 0, V100: this torch (")
    assert "has no code for sm_70, only for sm_75; install a torch for an older CUDA version" in v100
    assert not list(doctor._of_device("device 0, H200", (9, 0), ["sm_90"], None))


@pytest.mark.gpu
@pytest.mark.usefixtures("enough_shared_memory")
def test_doctor_on_a_gpu() -> None:
    lines = list(examine())
    assert any(line.startswith("OK device: device 0, ") for line in lines), lines
    assert "OK compilers: a Triton kernel was built and ran" in lines


@pytest.mark.usefixtures("enough_shared_memory")
def test_doctor_says_that_a_preset_is_made_for_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--preset", "dit-s-8-256"]) == 0
    assert "the preset is made for GPUs, and --performance.device cpu runs it here" in capsys.readouterr().out


def test_doctor_refuses_an_unknown_preset_before_it_says_anything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--preset", "digist"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "did you mean digits?" in printed.err


@pytest.mark.parametrize("scale", ["nan", "inf", "-inf", "much"])
def test_a_guidance_scale_is_a_finite_number(scale: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", "runs/any", f"--cfg={scale}"]) == 2
    assert f"--cfg: {scale}: expected a finite number" in capsys.readouterr().err


def test_without_arguments_a_command_shows_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["help"], ["launch"], ["help", "launch"], ["bench"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
        said = capsys.readouterr()
        assert "usage: fastdiff" in said.out
        assert said.err == ""


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fastdiff", "-V"], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (0, f"fastdiff {fastdiff.__version__}\n")


def test_flags_of_every_command_are_known_with_both_hyphens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["encode", "synthetic", str(tmp_path / "a"), "--shape", "1,8,8", "--samples_per_shard", "0"]) == 2
    assert "--samples-per-shard: 0: expected a whole number" in capsys.readouterr().err
