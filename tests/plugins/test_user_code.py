"""Code of users: found, identified and blamed; and what a run folder names is not executed."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fastdiff.config.command_line.config_file import read
from fastdiff.config.networks.registry import networks
from fastdiff.config.networks.user_defined import add_network, file_of
from fastdiff.errors import ConfigError
from fastdiff.evaluation.user_metrics import open_metrics
from fastdiff.models.build import build_model
from fastdiff.models.family import family_of
from fastdiff.plugins import user_code
from fastdiff.plugins.promises import require_by_position
from fastdiff.plugins.user_code import faults_of, identity_of, load
from fastdiff.version import PACKAGE

NET = """
from torch import nn
class Net(nn.Module):
    def __init__(self, channels: int = 2, size: int = 4, classes: int = 3, width: int = 5):
        super().__init__()
        self.register_buffer("ones", __import__("torch").ones(3))
        self.layer = nn.Linear(channels, width)
        self.out = nn.Linear(width, channels)
    def forward(self, noisy, time, label):
        return self.out(self.layer(noisy.movedim(1, 3))).movedim(3, 1)
"""


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], str]:
    def write(content: str, name: str = "own.py") -> str:
        (tmp_path / name).write_text(content)
        return str(tmp_path / name)

    return write


def test_a_file_is_executed_once_and_identified_by_its_content(file: Callable[[str], str]) -> None:
    path = file("import itertools\ncount = itertools.count()\nfirst = next(count)\n")
    found = load(f"{path}:first", "fastdiff.metrics", "--metric")
    assert (
        load(f"{path}:count", "fastdiff.metrics", "--metric").found
        is load(f"{path}:count", "fastdiff.metrics", "--metric").found
    )
    assert found.identity == identity_of(f"{path}:first", "fastdiff.metrics", "--metric")
    assert found.identity.startswith("first sha256 ")
    file("first = 8\n")
    again = load(f"{path}:first", "fastdiff.metrics", "--metric")
    assert (found.found, again.found) == (0, 8)
    assert again.identity != found.identity


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("x = 1\ny = 1 / 0\n", "x", "own.py:2: ZeroDivisionError"),
        ("def broken(:\n", "x", "own.py:1: SyntaxError"),
        ("x = 1\n", "z", "own.py has no z"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(file: Callable[[str], str], content: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(f"{file(content)}:{name}", "fastdiff.metrics", "--metric")
    assert message in str(caught.value)


@pytest.mark.parametrize("path", [f"{PACKAGE}_lion/lion.py", "/home/me/torch/lion.py"])
def test_the_line_of_a_fault_is_of_the_package_that_raises_it(path: str) -> None:
    """Also of one in a folder whose path begins as that of fastdiff, or names torch."""
    code = compile("\nfound = {}['lr']\n", path, "exec")
    with pytest.raises(ConfigError, match=rf"^lion raises KeyError \('lr'\) at {path}:2; mend that code$"):
        with faults_of("lion", lambda _: False):
            exec(code)


def test_an_unknown_name_lists_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--metric nope: expected PATH.py:NAME.*no package with entry points"):
        load("nope", "fastdiff.metrics", "--metric")
    with pytest.raises(ConfigError, match=r"nowhere.py cannot be read"):
        load("nowhere.py:f", "fastdiff.metrics", "--metric")


def test_an_installed_package_provides_plug_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_metrics.py").write_text("def gap(a, b):\n    return abs(a - b).max()\n")
    metadata = tmp_path / "own_metrics-1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: own-metrics\nVersion: 1.2\n")
    (metadata / "entry_points.txt").write_text("[fastdiff.metrics]\ngap = own_metrics:gap\n")
    monkeypatch.syspath_prepend(tmp_path)
    (metric,) = open_metrics(["gap"])
    assert metric.plugin.identity == "gap of own-metrics 1.2"
    assert list(user_code.installed("fastdiff.metrics")) == ["gap"]


def test_a_plain_module_is_a_network(file: Callable[[str], str]) -> None:
    path = file(NET)
    assert add_network(f"{path}:Net", "--model.kind") == "net"
    config = networks()["net"](width=7)  # type: ignore[call-arg]
    network = build_model(config, seed=3)
    assert [tuple(p.shape) for p in network.parameters()] == [(7, 2), (7,), (2, 7), (2,)]
    assert network.inputs == ("label",)
    assert (config.channels, config.size, config.classes) == (2, 4, 3)
    assert family_of(config).multiply_adds(config) == 4 * 4 * (2 * 7 + 7 * 2)
    assert list(family_of(config).buffers(config)) == ["ones"]
    assert file_of("net") is not None
    file(NET.replace("width: int = 5", "width: int = 6"))
    assert add_network(f"{path}:Net", "--model.kind") == "net", "an edited file replaces its network"
    assert networks()["net"]().width == 6  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("Net = 3\n", "expected a class derived from torch.nn.Module"),
        (NET.replace("width: int = 5", "width=5"), "expected a type"),
        (NET.replace("width: int = 5", "width: list = []"), "expected a type"),
        (NET.replace("class Net(nn.Module):", "class Net(nn.Module):\n    kind = 'dit'"), "two networks have the kind"),
    ],
)
def test_what_is_no_network_is_refused(file: Callable[[str], str], content: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        add_network(f"{file(content)}:Net", "--model.kind")
    assert message in str(caught.value)


def test_the_record_of_a_run_names_no_code_to_execute(tmp_path: Path) -> None:
    """A run.json given as --config: its code must be named once more, by the user."""
    trap = tmp_path / "trap.py"
    trap.write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    record = tmp_path / "run.json"
    for section, field, value in (("objective", "plugin", f"{trap}:f"), ("model", "kind", f"{trap}:f")):
        record.write_text(f'{{"config": {{"{section}": {{"{field}": "{value}"}}}}}}')
        with pytest.raises(ConfigError, match=rf"to execute it, add --{section}.{field} "):
            read(str(record))
    record.write_text(f'{{"config": {{"output": {{"callbacks": ["{trap}:f"]}}}}}}')
    with pytest.raises(ConfigError, match=r"add --output.callbacks "):
        read(str(record))
    assert read(str(record), [f"{trap}:f"]).fields["output"]["callbacks"] == [f"{trap}:f"]
    assert not (tmp_path / "sprung").exists()


CALLS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "draws": (lambda x: nn.functional.dropout(x, 0.5), "draws from torch's generator"),
    "reads": (lambda x: x * x.sum().item(), "_local_scalar_dense reads a number"),
    "branches": (lambda x: x if x.sum() > 0 else -x, "reads a number"),
    "selects": (lambda x: x * x[x > 0].mean(), "depends on values"),
    "copies": (lambda x: x * torch.tensor(0.5), "copies a constant from the host"),
    "mixes": (lambda x: x - x.mean(), "in another micro-batch"),
    "overflows": (lambda x: x / 0, "not finite"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_broken_promise_is_named(name: str) -> None:
    call, message = CALLS[name]
    inputs = {"x": torch.linspace(1, 2, 8).view(4, 2)}
    with pytest.raises(ConfigError) as caught:
        require_by_position(lambda given: call(given["x"]), inputs, "own.py:f")
    assert str(caught.value).startswith("own.py:f")
    assert message in str(caught.value)


def test_a_kept_promise_passes_and_a_kept_state_does_not() -> None:
    inputs = {"x": torch.linspace(1, 2, 8).view(4, 2)}
    assert require_by_position(lambda given: given["x"] * 2, inputs, "f").shape == (4, 2)
    calls: list[int] = []

    def counts(given: object) -> Tensor:
        calls.append(1)
        return inputs["x"] * len(calls)

    with pytest.raises(ConfigError, match="must not keep a state"):
        require_by_position(counts, inputs, "f")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 'x'", "returns a str, expected a finite number"),
        ("return float('nan')", "returns nan, expected a finite number"),
        ("a += 1; return 0.0", "read-only"),
        ("import random; return random.random()", "other numbers when it is called again"),
    ],
)
def test_metrics_keep_their_promises(file: Callable[[str], str], body: str, message: str) -> None:
    (metric,) = open_metrics([f"{file(f'def f(a, b):{chr(10)}    {body}')}:f"])
    with pytest.raises(ConfigError) as caught:
        metric(np.zeros((4, 2), np.float32), np.ones((4, 2), np.float32))
    assert message in str(caught.value)


def test_a_metric_does_not_replace_another_figure(file: Callable[[str], str]) -> None:
    with pytest.raises(ConfigError, match="fid is the name of another figure"):
        open_metrics([f"{file('def fid(a, b): return 0.0')}:fid"])
