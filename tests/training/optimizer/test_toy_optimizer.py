"""Another package can add an optimizer, with state of its own and whole matrices; nothing of fastdiff knows it."""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from fastdiff.cli.main import main
from fastdiff.config.command_line.config_file import with_optimizer
from fastdiff.config.command_line.train_flags import parse
from fastdiff.config.optimizers import registry
from fastdiff.config.optimizers.family import OptimizerFamily, StateTensor
from fastdiff.config.optimizers.muon import MUON
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.optim import OptimConfig
from fastdiff.errors import ConfigError
from fastdiff.parallel.fragments import Fragment
from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from fastdiff.training.optimizer import owners
from fastdiff.training.optimizer.build import build_optimizer
from tests.support.installed.packages import install
from tests.support.killed import assert_it_goes_on
from tests.support.processes import ROOT, Finished, run_ranks
from tests.support.runs import assert_same_checkpoint, copy_run, hexes, launch, losses, newest, tiny, train_losses
from tests.support.scripts import COMMAND, TRAIN, run_job, run_script

SUPPORT = ROOT / "tests" / "support"


@dataclass(frozen=True, kw_only=True, slots=True)
class RAdamConfig(OptimConfig):
    """An optimizer of torch that updates each element by itself."""

    name: Literal["radam"] = "radam"
    betas: tuple[float, float] = (0.9, 0.99)


RADAM = OptimizerFamily(
    name="radam",
    config=RAdamConfig,
    optimizer="torch.optim:RAdam",
    state=(StateTensor(name="exp_avg"), StateTensor(name="exp_avg_sq")),
    counts="tensor",
)


class Half(torch.optim.Optimizer):
    """Keeps its moment in bf16, and creates it in its first step."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.decay = betas[0]

    @torch.no_grad()
    def step(self, closure: None = None) -> Any:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                moment = self.state[p].setdefault("moment", torch.zeros_like(p, dtype=torch.bfloat16))
                p.sub_(moment.lerp_(p.grad.bfloat16(), 1 - self.decay), alpha=group["lr"])


@dataclass(frozen=True, kw_only=True, slots=True)
class HalfConfig(RAdamConfig):
    name: Literal["half"] = "half"  # type: ignore[assignment]


HALF = OptimizerFamily(
    name="half",
    config=HalfConfig,
    optimizer=f"{__name__}:Half",
    state=(StateTensor(name="moment", dtype="bfloat16"),),
)
ENGINES = [("flat", 0), ("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3)]


def config_of(digits: Path, folder: Path, engine: str, steps: int, name: str = "toy") -> RunConfig:
    if str(SUPPORT) not in sys.path:  # in a process of its own
        sys.path.insert(0, str(SUPPORT))
    from toy_optimizer.family import TOY

    for family in (TOY, RADAM, HALF):
        registry.register(family)
    return with_optimizer(tiny(digits, folder, steps, performance__engine=engine), name, "this test")


Losses = dict[str, tuple[list[float], list[float]]]


def train_under(world: World, digits: Path, folder: Path, engines: Sequence[tuple[str, int]], optimizer: str) -> Losses:
    """Train six steps under each engine and stage, at once and in two parts; return both series of losses."""
    found = {}
    for engine, stage in engines:
        name = f"{engine}-{stage}"
        whole = train_losses(world, config_of(digits, folder / name / "whole", engine, 6, optimizer), launch(stage))
        train_losses(world, config_of(digits, folder / name / "parts", engine, 3, optimizer), launch(stage))
        copy_run(world, folder / name / "parts", folder / name / "start")
        parts = train_losses(world, config_of(digits, folder / name / "parts", engine, 6, optimizer), launch(stage))
        found[name] = whole, parts
    return found


def go_on(world: World, digits: Path, start: Path, folder: Path) -> dict[str, list[float]]:
    """Go on from a run of three steps under every engine and stage; return the losses of all six."""
    found = {}
    for engine, stage in ENGINES:
        name = f"{engine}-{stage}"
        copy_run(world, start, folder / name)
        found[name] = train_losses(world, config_of(digits, folder / name, engine, 6), launch(stage))
    return found


def test_every_engine_and_stage_trains_alike_and_resumes_bitwise(digits: Path, tmp_path: Path) -> None:
    found = run_ranks(train_under, digits, tmp_path, ENGINES, "toy", ranks=2)[0]
    expected = found["flat-0"][0]
    assert expected[-1] < expected[0]
    for name, (whole, parts) in found.items():
        assert hexes(parts) == hexes(whole), name
        assert_same_checkpoint(tmp_path / name / "whole", tmp_path / name / "parts")
        assert whole == pytest.approx(expected, rel=1e-5), name
    norms = {name: norms_of(tmp_path / name / "whole") for name in found}
    assert all(found == pytest.approx(norms["flat-0"], rel=1e-4) for found in norms.values())

    one = run_ranks(go_on, digits, tmp_path / "deepspeed-3" / "start", tmp_path / "one", ranks=1)[0]
    for name, after in one.items():
        assert after == pytest.approx(expected, rel=1e-5), f"two ranks of ZeRO-3 -> one rank, {name}"


def exchanges(world: World, digits: Path, folder: Path) -> dict[int, tuple[list[float], int]]:
    """Train six steps under ZeRO-3, by the elements gathered at once; return the losses and the exchanges."""
    found = {}
    for most in (owners.PER_RANK, 1 << 10):
        with pytest.MonkeyPatch.context() as patch:
            counted = Mock(wraps=dist.batch_isend_irecv)
            patch.setattr(dist, "batch_isend_irecv", counted)
            patch.setattr(owners, "PER_RANK", most)
            config = config_of(digits, folder / str(most), "deepspeed", 6)
            found[most] = train_losses(world, config, launch(3)), counted.call_count
            ops = [op for call in counted.call_args_list for op in call.args[0]]
            assert all(op.tensor._is_view() for op in ops), "from where it is to where it belongs, without a copy"
    return found


def test_many_matrices_are_gathered_at_once(digits: Path, tmp_path: Path) -> None:
    (losses, calls), (in_parts, more) = run_ranks(exchanges, digits, tmp_path, ranks=2)[0].values()
    assert calls == 2 * 6, "to the owners and back"
    assert more > 2 * calls
    assert hexes(in_parts) == hexes(losses)


@pytest.mark.parametrize(("optimizer", "rel"), [("radam", 1e-5), ("half", 1e-2)])
def test_a_record_is_enough_for_an_optimizer_of_flat_tensors(
    optimizer: str, rel: float, digits: Path, tmp_path: Path
) -> None:
    found = run_ranks(train_under, digits, tmp_path, (("flat", 0), ("deepspeed", 2)), optimizer, ranks=2)[0]
    for name, (whole, parts) in found.items():
        assert hexes(parts) == hexes(whole), name
        assert whole == pytest.approx(found["flat-0"][0], rel=rel), name
        assert newest(tmp_path / name / "whole").optimizer_steps == 6


def test_state_of_another_dtype_than_declared_ends_the_run(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = replace(HALF, state=(StateTensor(name="moment"),))
    monkeypatch.setitem(registry._registered, "half", declared)
    config = with_optimizer(tiny(digits, tmp_path, 1), "half", "this test")
    with pytest.raises(ConfigError, match=r"--optim.name half: .*'torch.bfloat16', .*expected 4 bytes"):
        train(config, launch(0), world)


def test_the_optimizer_of_the_command_line_replaces_that_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SUPPORT)
    from toy_optimizer.family import TOY

    monkeypatch.setitem(registry._registered, "toy", TOY)
    file = tmp_path / "run.yaml"

    def parsed(optim: str) -> OptimConfig:
        file.write_text(f"optim: {{{optim}}}")
        words = ["--preset", "digits", "--config", str(file), "--optim.name", "toy", "--optim.schedule", "constant"]
        return parse([*words, "--optim.warmup-steps", "0"])[1].optim

    found = parsed("name: adamw, eps: 1.0e-6, clip: 3.0, schedule: constant, warmup_steps: 5")
    assert (type(found).__name__, found.lr, found.clip) == ("ToyConfig", 1e-2, 3.0)
    assert parsed("momentum: 0.7").hyper_parameters()["momentum"] == 0.7, "it names none"


def norms_of(run: Path) -> dict[str, float]:
    """The saved norm of every matrix; other parameters have none."""
    saved = newest(run)
    assert saved.manifest["sliced_state"] == ["moment", "norm"]
    shapes = saved.manifest["parameters"]
    names = {key.removeprefix("norm/") for _, key in saved.keys("norm/")}
    assert names == {name for name, shape in shapes.items() if len(shape) > 1}
    found = {name: float(saved.slice("norm", Fragment(name, 0, 1, 0))) for name in names}
    assert any(found.values())
    return found


@pytest.fixture
def not_imported() -> Iterator[None]:
    """Hide the modules of the toy optimizer that earlier tests imported, and forget those that this one imports."""

    def taken() -> dict[str, ModuleType]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("toy_optimizer")}

    before = taken()
    yield
    taken()
    sys.modules.update(before)


def installed(site: Path, entry: str = "toy_optimizer.family:TOY") -> Path:
    """A folder for PYTHONPATH with the toy optimizer, as pip leaves it there."""
    return install(site, "toy_optimizer", {"fastdiff.optimizers": f"toy = {entry}"})


def test_an_installed_optimizer_is_planned_trained_sampled_and_exported(digits: Path, tmp_path: Path) -> None:
    site, folder, out = installed(tmp_path / "site"), tmp_path / "run", tmp_path / "out"
    chosen = ["--preset", "digits", "--optim.name", "toy", "--optim.momentum", "0.8"]

    def fastdiff(*words: str | Path) -> str:
        return ended(run_script(COMMAND, *words, PYTHONPATH=str(site)))

    def ended(finished: Finished) -> str:
        assert finished.code == 0, finished.output
        return finished.output

    said = fastdiff("train", *chosen, "--data.path", digits, "--dry-run")  # warnings of the machine may come first
    dry = json.JSONDecoder().raw_decode(said[said.index("{") :])[0]["config"]["optim"]
    assert (dry["name"], dry["lr"], dry["momentum"], dry["schedule"]) == ("toy", 0.01, 0.8, "cosine")
    assert "eps" not in dry, "it is none of its hyper-parameters"
    assert "32-bit" in fastdiff("plan", *chosen, "--data.path", digits, "--gpus", "2xH100")

    flags = [
        *chosen, "--optim.schedule", "constant", "--optim.warmup-steps", "0", "--data.path", digits,
        "--batch.samples", "16", "--output.folder", folder, "--output.log-every", "1", "--output.sample-every", "0",
    ]  # fmt: skip
    ended(run_job(TRAIN, *flags, "--samples", "48", ranks=2, PYTHONPATH=str(site)))
    assert "resuming from step 3" in ended(run_job(TRAIN, *flags, "--samples", "64", ranks=1, PYTHONPATH=str(site)))
    assert len(losses(folder)) == 4
    assert all(map(math.isfinite, losses(folder)))
    assert newest(folder).manifest["versions"]["plugin.optimizer"] == "toy of toy-optimizer 1.0"

    fastdiff("sample", folder, "--grid", tmp_path / "grid.png", "--classes", "0-2", "--steps", "2")
    fastdiff("export", folder, out, "--format", "safetensors", "--raw")
    weights, trained = load_file(out / "model.safetensors"), newest(folder).weights()
    assert all(torch.equal(weights[name], trained[name]) for name in trained)
    assert "toy, weight decay 0.0, momentum 0.8, clipped at 1" in (out / "README.md").read_text()

    unknown = run_script(COMMAND, "sample", folder, "--grid", tmp_path / "grid.png")
    assert unknown.code == 2
    assert "optim.name: not a known optimizer, given 'toy'; expected adamw, adamw8bit, adamw8bit-bnb" in unknown.output


def test_a_killed_run_goes_on_bitwise(digits: Path, tmp_path: Path) -> None:
    assert_it_goes_on(digits, tmp_path, "toy", PYTHONPATH=str(installed(tmp_path / "site")))


def test_an_optimizer_that_refuses_vectors_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = StateTensor(name="momentum_buffer")
    family = replace(RADAM, name="muon", optimizer="torch.optim:Muon", state=(moment,), whole_matrices=True)
    monkeypatch.setitem(registry._registered, "muon", family)
    optimizer = build_optimizer([torch.zeros(8)], OptimConfig(name="muon"), skip_non_finite=False)
    assert optimizer.param_groups[0]["lr"] == 1e-4


@pytest.mark.usefixtures("not_imported")
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("toy_optimizer.nowhere:TOY", r"the optimizer toy of toy-optimizer cannot be imported \(No module .*nowhere"),
        (
            "toy_optimizer.family:ToyConfig",
            "the optimizer toy of toy-optimizer is a type, expected an OptimizerFamily",
        ),
        (
            "fastdiff.config.optimizers.adamw:ADAMW",
            "the optimizer toy of toy-optimizer registers adamw, which is of fastdiff; rename it",
        ),
    ],
)
def test_an_installed_optimizer_that_is_none_is_named(
    entry: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed(tmp_path, entry))
    monkeypatch.setattr(registry, "_installed", registry._installed.__wrapped__)
    assert registry.family_of(RunConfig().optim).name == "adamw", "it stops only runs that name it"
    with pytest.raises(ConfigError, match=message):
        registry.optimizer_family("toy")


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (replace(RADAM, optimizer="toy_optimizer.nowhere:Toy"), r"toy_optimizer.nowhere:Toy of torch, .*\(No module"),
        (replace(RADAM, optimizer="torch.optim:Radam"), r"needs torch.optim:Radam of torch, .* no attribute 'Radam'\)"),
        (replace(RADAM, optimizer="torch.optim:SparseAdam"),
         "called with the parameters and lr, weight_decay, betas, but got .* 'weight_decay'; let its __init__ take"),
        (replace(RADAM, whole_matrices=True, matrix_step=MUON.matrix_step),
         "asks for the matrices of a network, and torch.optim:RAdam does not derive from .*owners.OverRanks"),
        (replace(RADAM, arguments={"eps": -1}), r"RAdam raises ValueError \(Invalid epsilon .*\) at .*radam.py:\d+;"),
    ],
)  # fmt: skip
def test_a_class_that_does_not_fit_its_record_is_named(
    family: OptimizerFamily, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry._registered, "radam", family)
    with pytest.raises(ConfigError, match=f"--optim.name radam.*{message}"):
        build_optimizer([torch.zeros(8)], RAdamConfig(), skip_non_finite=False)


def test_a_fault_of_a_built_in_optimizer_keeps_its_traceback() -> None:
    with pytest.raises(TypeError, match="can only optimize Tensors"):
        build_optimizer([3], RunConfig().optim, skip_non_finite=False)  # type: ignore[list-item]


@pytest.mark.usefixtures("not_imported")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "module 'toy_optimizer.optimizer' has no attribute 'Toy'"),
        ("def broken(:", "invalid syntax"),
        ("raise RuntimeError('CUDA Setup failed')", "CUDA Setup failed"),
        ("raise OSError('libtoy.so: cannot open shared object file')", "libtoy.so: cannot open"),
    ],
)
def test_a_dry_run_imports_the_class_of_another_package(
    content: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(installed(tmp_path, "toy_optimizer.family:TOY"))
    (tmp_path / "toy_optimizer" / "optimizer.py").write_text(content)
    monkeypatch.setattr(registry, "_installed", registry._installed.__wrapped__)
    monkeypatch.delitem(registry._registered, "toy", raising=False)
    assert main(["train", "--preset", "digits", "--optim.name", "toy", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert f"needs toy_optimizer.optimizer:Toy of toy-optimizer, which cannot be imported ({message}" in said


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"config": dict}, "its config does not derive from OptimConfig"),
        ({"state": (StateTensor(name="a", unit="row"),)}, "a has the unit row, expected element, block, matrix"),  # type: ignore[arg-type]
        ({"state": (StateTensor(name="a", of="matrices"),)}, "a is of matrices, which needs .*=True and a matrix_step"),
    ],
)
def test_a_wrong_record_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"the optimizer radam cannot be registered: {message}"):
        registry.register(replace(RADAM, **wrong))
