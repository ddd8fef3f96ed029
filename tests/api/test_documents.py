"""The examples of docs/api.md are run in the order of the page."""

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.presets import PRESETS, preset
from tests.support.processes import ROOT

BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE | re.DOTALL)
LONGEST = 25
"""Lines of an example."""


@pytest.fixture
def small_preset(monkeypatch: pytest.MonkeyPatch, nightly: bool) -> None:
    """By day the preset of the examples has a network that trains and draws in a tenth of the time, and no pictures."""
    if nightly:
        return
    config = preset("digits")
    network = DiTConfig(depth=1, hidden=32, heads=2, patch=2, channels=1, size=8, classes=10)
    data, output = replace(config.data, loader="prefetch"), replace(config.output, sample_every=0)
    small = replace(config, model=network, data=data, output=output)
    monkeypatch.setitem(PRESETS, "digits", lambda: small)


@pytest.mark.nightly
@pytest.mark.usefixtures("small_preset")
def test_the_examples_run(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(digits, tmp_path / "data" / "digits")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "kernels")]))
    assert len(BLOCKS) >= 12
    names: dict[str, object] = {}
    for block in BLOCKS:
        assert len(block.splitlines()) <= LONGEST
        if (file := re.match(r"# (\w+\.py)\n", block)) is not None:
            (tmp_path / file[1]).write_text(block)
        else:
            exec(compile(block, "docs/api.md", "exec"), names)
    assert (tmp_path / "three.png").is_file()
    assert (tmp_path / "digits-dit" / "dit.pt").is_file()
    assert (tmp_path / "runs" / "huber" / "callbacks.jsonl").read_text().count("weight_norm") == 2
    assert (tmp_path / "runs" / "huber" / "note.txt").read_text() == "1280 samples\n"
    assert (tmp_path / "data" / "squares" / "dataset.json").is_file()
