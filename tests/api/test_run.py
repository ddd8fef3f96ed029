"""A run folder as an object: what it names is not executed."""

import json
from pathlib import Path
from typing import Any

import pytest

import fastdiff
from tests.dashboard.folders import ledger, lines, run_folder

EVIL = """
from pathlib import Path
Path(__file__).with_suffix(".ran").touch()
def loss(*arguments): ...
class Watch:
    def on_end(self, run): ...
"""


def record(folder: Path, **changes: Any) -> Path:
    """Write a run folder that is a record alone."""
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"config": fastdiff.preset("digits", **changes).to_dict()}))
    return folder


@pytest.mark.parametrize("section", ["objective", "output"])
def test_code_that_a_run_names_is_not_executed(tmp_path: Path, section: str) -> None:
    """Neither by its configuration nor by a training with it; the user names it first."""
    evil = tmp_path / "evil.py"
    evil.write_text(EVIL)
    text = f"{evil}:loss" if section == "objective" else f"{evil}:Watch"
    changes = {"objective": {"plugin": text}, "output": {"callbacks": (text,)}}
    folder = record(tmp_path / "run", **{section: changes[section]})
    with pytest.raises(fastdiff.ConfigError, match="names code"):
        fastdiff.train(fastdiff.Run(folder).config)
    with pytest.raises(fastdiff.ConfigError, match="names code"):
        fastdiff.Config.from_file(folder / "run.json")
    assert not evil.with_suffix(".ran").exists()
    expected = fastdiff.Run(folder, plugins=[text]).config.to_dict()
    assert fastdiff.Config.from_file(folder / "run.json", plugins=[text]).to_dict() == expected


def test_a_failed_run_shows_its_error_first(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", steps=())
    told = {"event": "end", "at": 1031.0, "step": 0, "outcome": "DataError", "message": "shard 3 <b>is</b> damaged"}
    (folder / "ledger.jsonl").write_text(lines([*ledger()[:2], told]))
    shown = fastdiff.Run(folder)._repr_html_()
    assert "shard 3 &lt;b&gt;is&lt;/b&gt; damaged" in shown
    assert shown.index("damaged") < shown.index(">network<") < shown.index("none recorded of 200")
