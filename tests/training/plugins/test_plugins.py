"""Networks, losses and callbacks of users in real runs: the promises of a run hold for them, too."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fastdiff
from fastdiff.api.config import Config
from fastdiff.errors import ConfigError
from fastdiff.parallel.world import World
from fastdiff.training import compiled_code
from fastdiff.training.loop import train
from fastdiff.training.plugins.network import check_network
from tests.support.runs import STEPS, flags, hexes, launch, losses, tiny, train_losses
from tests.support.scripts import COMMAND, TRAIN, run_job, run_script

OWN = """
import torch
from torch import nn

class Mlp(nn.Module):
    def __init__(self, channels: int = 1, size: int = 8, classes: int = 10, width: int = 16):
        super().__init__()
        self.enter = nn.Linear(channels * size**2 + 1, width)
        self.labels = nn.Embedding(classes + 1, width)
        self.leave = nn.Linear(width, channels * size**2)

    def forward(self, noisy, time, label):
        given = torch.cat([noisy.flatten(1), time[:, None] / 1000], dim=1).to(noisy.dtype)
        return self.leave(torch.tanh(self.enter(given) + self.labels(label))).view_as(noisy)

def squared(prediction, target, levels, position):
    return (prediction - target).square().flatten(1).mean(1)

class Watch:
    every = 2

    def __init__(self):
        torch.manual_seed(9)  # of no effect on the run

    def on_step(self, run):
        norm = sum(float(w.detach().norm()) for w in run.network.parameters())
        run.log({"drawn": float(torch.rand(())), "norm": norm})

    def on_end(self, run):
        (run.folder / f"end-{run.rank}-of-{run.ranks}").write_text(str(run.step))
"""
CPU = torch.device("cpu")
FORWARD = "    def forward(self, noisy, time, label):\n"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def network_of(path: Path, digits: Path, folder: Path, **changes: Any) -> Config:
    config = Config.of(tiny(digits, folder, **changes))
    return config.changed(model={"kind": f"{path}:Mlp"})


def test_code_is_kept_for_one_file_of_a_network(digits: Path, own: Path, tmp_path: Path) -> None:
    """torch keys graphs by the names of a user's ops, and not by their gradients; a callback compiles nothing."""
    digest = hashlib.sha256(own.read_bytes()).hexdigest()
    assert f"sha256 {digest}" in compiled_code._of_run(network_of(own, digits, tmp_path))["network"]
    with_callback = tiny(digits, tmp_path, output__callbacks=(f"{own}:Watch",))
    assert compiled_code._of_run(with_callback) == compiled_code._of_run(tiny(digits, tmp_path))


def test_the_squared_error_as_a_plug_in_trains_as_the_built_in_one(
    world: World, digits: Path, own: Path, tmp_path: Path
) -> None:
    """Also with a weighting, an offset and coarser noise; up to the order of sums."""
    changes = {
        "objective__weighting": "min_snr",
        "objective__noise_offset": 0.1,
        "objective__multires_noise_iterations": 2,
    }
    plain = train_losses(world, tiny(digits, tmp_path / "a", **changes), launch(0))
    config = tiny(digits, tmp_path / "b", **changes, objective__plugin=f"{own}:squared")
    assert train_losses(world, config, launch(0)) == pytest.approx(plain, rel=1e-5)


def test_a_callback_of_a_user_changes_nothing(world: World, digits: Path, own: Path, tmp_path: Path) -> None:
    plain = train_losses(world, tiny(digits, tmp_path / "a"), launch(0))
    config = tiny(digits, tmp_path / "b", output__callbacks=(f"{own}:Watch",))
    assert hexes(train_losses(world, config, launch(0))) == hexes(plain)
    logged = [json.loads(line) for line in (tmp_path / "b" / "callbacks.jsonl").read_text().splitlines()]
    assert [record["step"] for record in logged] == [2, 4, 6]
    assert all(record["norm"] > 0 for record in logged)
    assert (tmp_path / "b" / "end-0-of-1").read_text() == str(STEPS)


def test_a_users_network_is_the_same_run_on_two_ranks_and_another_file_does_not_resume(
    digits: Path, own: Path, tmp_path: Path
) -> None:
    """ZeRO-3 on two ranks, one rank, a resume, a refused resume, and sampling with and without the file named."""
    words = [
        "--preset", "digits", "--model.kind", f"{own}:Mlp", "--model.width", "24", "--data.path", digits,
        "--batch.samples", "16", "--output.log-every", "1", "--output.sample-every", "0", "--optim.warmup-steps", "0",
        "--optim.schedule", "constant", "--output.callbacks", f"{own}:Watch", "--objective.plugin", f"{own}:squared",
    ]  # fmt: skip
    zero3 = ["--deepspeed_config", "deepspeed_configs/zero3.json"]
    folder = tmp_path / "two"
    for name, ranks, more in (("one", 1, []), ("two", 2, zero3)):
        done = run_job(TRAIN, *words, *more, "--steps", "3", "--output.folder", tmp_path / name, ranks=ranks)
        assert done.code == 0, done.output
        assert f"--format safetensors --plugin {own}:Mlp" in done.output, "the next commands name the code"
    assert losses(folder) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert (folder / "end-1-of-2").exists()
    versions = json.loads((folder / "run.json").read_text())["versions"]
    assert versions["plugin.network"].startswith(f"{own}:Mlp sha256 ")
    assert set(versions) >= {"plugin.network", "plugin.objective", "plugin.callback.0"}

    moved = tmp_path / "moved"
    moved.mkdir()
    again = [str(word).replace(str(own), str(moved / "own.py")) for word in words]
    (moved / "own.py").write_text(OWN)
    done = run_job(TRAIN, *again, "--steps", "5", "--output.folder", folder, ranks=1)
    assert "resuming from step 3" in done.output, done.output
    (moved / "own.py").write_text(OWN + "# edited\n")
    done = run_job(TRAIN, *again, "--steps", "6", "--output.folder", folder, ranks=1)
    assert done.code == 2
    assert "--plugin.network: " in done.output
    assert "accept it with --allow-change plugin.network --allow-change plugin.objective" in done.output

    (moved / "own.py").write_text(OWN)
    grid = tmp_path / "grid.png"
    refused = run_script(COMMAND, "sample", folder, "--grid", grid, "--steps", "2")
    assert refused.code == 2
    assert f"name it yourself: --plugin {moved / 'own.py'}:Mlp" in refused.output
    done = run_script(COMMAND, "sample", folder, "--grid", grid, "--steps", "2", "--plugin", f"{own}:Mlp")
    assert done.code == 0, done.output
    assert grid.is_file()
    for words in (
        ["reference", "make", folder, moved / "reference.json"],
        ["conform", folder, moved / "reference.json"],
    ):
        done = run_script(COMMAND, *words, "--plugin", f"{own}:Mlp")
        assert done.code == 0, done.output
    with pytest.raises(ConfigError, match=r"names code: .*squared"):
        _ = fastdiff.Run(folder).config
    training = [f"{moved / 'own.py'}:{name}" for name in ("squared", "Watch")]
    with pytest.raises(ConfigError, match="not a known network"):
        _ = fastdiff.Run(folder, plugins=training).config
    run = fastdiff.Run(folder, plugins=[f"{own}:Mlp", *training])
    assert run.config.model.kind == "mlp"
    card = run.export(tmp_path / "weights", "safetensors") / "README.md"
    assert "| Network of the user | `" in card.read_text()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return self.leave(self.enter(noisy.flatten(1)))", "own.py"),
        ("return noisy[:, :, :4]", "forward returns torch.float32 [4, 1, 4, 8], expected floating point [4, 1, 8, 8]"),
        ("return noisy - noisy.mean()", "in another micro-batch"),
        ("return torch.dropout(noisy, 0.5, True)", "draws from torch's generator"),
        ("return noisy * float(time.sum())", "reads a number from the device"),
        ("return noisy * self.enter.weight.sum()", "no gradient reaches enter.bias, labels.weight, leave.weight"),
    ],
)
def test_a_network_that_breaks_a_promise_is_refused(
    digits: Path, tmp_path: Path, own: Path, body: str, message: str
) -> None:
    head, _, _ = OWN.partition(FORWARD)
    own.write_text(f"{head}{FORWARD}        {body}\n")
    config = network_of(own, digits, tmp_path / "run")
    with pytest.raises(ConfigError) as caught:
        check_network(config, CPU)
    assert message in str(caught.value)


def test_16_bits_are_tried_before_the_first_step(digits: Path, tmp_path: Path, own: Path) -> None:
    own.write_text(OWN.replace(".to(noisy.dtype)", ".float()"))
    check_network(network_of(own, digits, tmp_path / "run"), CPU)
    config = network_of(own, digits, tmp_path / "run", performance__precision="bf16")
    with pytest.raises(ConfigError, match=r"own.py:\d+: RuntimeError: .*dtype"):
        check_network(config, CPU)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return (prediction - target).square().mean()", "returns torch.float32 [] for 4 samples"),
        ("return (prediction - target).detach().square().flatten(1).mean(1)", "losses without a gradient"),
        ("return prediction.sqrt().flatten(1).sum(1)", "not finite"),
        ("return 1 / 0", "own.py:3: ZeroDivisionError"),
    ],
)
def test_a_loss_that_breaks_a_promise_is_refused(
    world: World, digits: Path, tmp_path: Path, body: str, message: str
) -> None:
    own = tmp_path / "own.py"
    own.write_text(f"\ndef loss(prediction, target, levels, position):\n    {body}\n")
    with pytest.raises(ConfigError) as caught:
        train(tiny(digits, tmp_path / "run", objective__plugin=f"{own}:loss"), launch(0), world)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("class Own:\n    pass\n", "expected at least one of the methods on_step"),
        ("class Own:\n    every = 0\n    def on_step(self, run): ...\n", "its every is 0"),
        ("class Own:\n    def __init__(self): raise KeyError(3)\n", "own.py:2: KeyError: 3"),
    ],
)
def test_what_is_no_callback_is_refused(world: World, digits: Path, tmp_path: Path, content: str, message: str) -> None:
    own = tmp_path / "own.py"
    own.write_text(content)
    with pytest.raises(ConfigError) as caught:
        train(tiny(digits, tmp_path / "run", output__callbacks=(f"{own}:Own",)), launch(0), world)
    assert message in str(caught.value)


def test_the_null_class_is_tried(digits: Path, tmp_path: Path, own: Path) -> None:
    own.write_text(OWN.replace("Embedding(classes + 1", "Embedding(classes"))
    with pytest.raises(ConfigError, match=r"own.py:\d+: IndexError"):
        check_network(network_of(own, digits, tmp_path / "run"), CPU)


def test_a_callback_that_fails_after_the_last_step_leaves_the_run_complete(
    world: World, digits: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.py"
    own.write_text("class Own:\n    def on_end(self, run): raise KeyError(3)\n")
    config = tiny(digits, tmp_path / "run", output__callbacks=(f"{own}:Own",))
    assert len(train_losses(world, config, launch(0))) == STEPS
    assert "own.py:2: KeyError: 3" in capfd.readouterr().err


def test_a_missing_file_is_told_before_the_ranks_start(digits: Path, tmp_path: Path) -> None:
    config = tiny(digits, tmp_path / "run", objective__plugin=f"{tmp_path}/nowhere.py:f")
    done = run_script(COMMAND, "train", *flags(config))
    assert done.code == 2
    assert "nowhere.py cannot be read" in done.output
    assert "starting" not in done.output
