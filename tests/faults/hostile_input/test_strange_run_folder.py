"""A run folder of a stranger: no command follows its links, waits for its pipes, or shows what lies outside of it."""

import ast
import base64
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fastdiff.api.run import Run
from fastdiff.cli.main import main
from fastdiff.dashboard.run_metadata import RunMetadata, glance
from fastdiff.errors import FastdiffError
from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from tests.dashboard.folders import picture
from tests.support.nights import by_day
from tests.support.runs import held_out, launch, tiny

ROOT = Path(__file__).parents[3]
SECRET = "HUNTER2"
LIMIT_S = 60
LOGS = ("run.json", "metrics.jsonl", "validation.jsonl", "ledger.jsonl")
WEIGHTS = ("checkpoints", "checkpoints/step-00000002", "checkpoints/step-00000002/MANIFEST.json",
           "checkpoints/step-00000002/rank-00000.safetensors")  # fmt: skip
DRAWN = ("samples", "samples/step-00000002.png", "validation", "validation/step-00000002.npz")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, digits: Path, world: World) -> Path:
    """A run of two steps with a validation and a picture."""
    folder = tmp_path_factory.mktemp("stranger") / "run"
    config = tiny(digits, folder, steps=2, validation__data=str(held_out(digits)), validation__every=2)
    train(config, launch(0), world)
    (folder / "samples").mkdir(exist_ok=True)
    picture(folder, 2)
    return folder


@pytest.fixture
def strange(trained: Path, tmp_path: Path) -> Path:
    """A copy, with the secret of somebody else beside it."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@contextmanager
def in_time() -> Iterator[None]:
    """Fail after a while: a command that waits for a pipe would wait for ever."""

    def stop(*_: object) -> None:
        raise AssertionError(f"hangs for {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def elsewhere(path: Path) -> Path:
    """Move a file or a folder of a run out of it; those of text get the secret."""
    run = next(parent for parent in path.parents if parent.name == "run")
    target = run.with_name(f"private-{path.name}")
    path.rename(target)
    if target.suffix == ".json":
        target.write_text(target.read_text().replace('"kind": "dit"', f'"kind": "{SECRET}"', 1))
    if target.suffix == ".jsonl":
        start = {"event": "start", "began": 1, "at": 1, "nodes": [SECRET], "samples": 1}
        line = {"step": 1, "loss": 1, "val_loss": 1, SECRET: 1}
        target.write_text(json.dumps(start | line) + "\n" + target.read_text())
    return target


def as_link(path: Path) -> None:
    path.symlink_to(elsewhere(path))


def as_dangling(path: Path) -> None:
    path.symlink_to(elsewhere(path).with_name("nowhere"))


def as_pipe(path: Path) -> None:
    elsewhere(path)
    os.mkfifo(path)


def as_device(path: Path) -> None:
    elsewhere(path)
    path.symlink_to("/dev/zero")


KINDS = (as_link, as_pipe)
HOSTILE = [
    *((name, KINDS[number % 2]) for number, name in enumerate([*LOGS, *DRAWN])),
    ("run.json", as_dangling),
    (DRAWN[1], as_device),
    *(
        pytest.param(*pair, marks=pytest.mark.nightly)
        for pair in [
            *((name, KINDS[1 - number % 2]) for number, name in enumerate([*LOGS, *DRAWN])),
            ("run.json", as_device),
            (DRAWN[1], as_dangling),
        ]
    ),
]
"""Each name of a run folder, and what stands in its place; by day each of both once."""


def answers(run: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[int, str]]:
    """Call every reader of a run folder; return exit code, and everything that it prints, shows or writes."""
    commands = {
        "report": ["report", str(run), str(out / "report.html")],
        "ledger": ["ledger", str(run)],
        "compare": ["compare", str(run), str(run), "--png", str(out / "compare.png")],
        "verify": ["verify", str(run)],
        "plan": ["plan", "--preset", "digits", "--from", str(run)],
        "sample": ["sample", str(run), "--per-class", "1", "--steps", "1", "--grid", str(out / "x.png")],
        "export": ["export", str(run), str(out / "exported"), "--format", "safetensors"],
    }  # fmt: skip
    found = {}
    for name, arguments in commands.items():
        with in_time():
            code = main(arguments)
        found[name] = (code, "".join(capsys.readouterr()))
    with in_time():
        shown = f"{RunMetadata(run).sections({})} {glance(run)}"
        try:
            opened = Run(run)
            shown += opened._repr_html_() + repr(opened) + str(opened.grids)
            shown += str(opened.metrics()) + str(opened.validation())
        except (FastdiffError, OSError) as error:
            shown += str(error)
    found["api and page"] = (0, shown + "".join(capsys.readouterr()))
    for path in (path for path in out.rglob("*") if path.is_file()):
        found[path.name] = (0, path.read_bytes().decode("latin-1"))
    return found


@pytest.mark.parametrize(("name", "kind"), HOSTILE)
def test_no_command_shows_what_a_name_leads_to(
    strange: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, kind: Callable[[Path], None]
) -> None:
    drawn = (strange / "samples" / "step-00000002.png").read_bytes()
    kind(strange / name)
    (tmp_path / "out").mkdir()
    found = answers(strange, tmp_path / "out", capsys)
    for what, (code, shown) in found.items():
        assert SECRET not in shown, what
        assert "Traceback" not in shown, what
        assert code in (0, 2, 65, 74), what
    if name.startswith("samples"):
        assert base64.b64encode(drawn)[:60].decode() not in "".join(shown for _, shown in found.values())
        assert not (tmp_path / "out" / "exported" / "samples.png").exists()


@pytest.mark.parametrize(
    ("name", "kind"),
    by_day(
        [(WEIGHTS[0], as_link), (WEIGHTS[3], as_pipe)],
        *((name, kind) for name in WEIGHTS for kind in (as_link, as_pipe)),
    ),
)
def test_weights_of_elsewhere_are_not_drawn_from(
    strange: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, kind: Callable[[Path], None]
) -> None:
    kind(strange / name)
    (tmp_path / "out").mkdir()
    found = answers(strange, tmp_path / "out", capsys)
    for command in ("sample", "export", "verify"):
        code, shown = found[command]
        assert code in (2, 74), shown
        assert "Traceback" not in shown
    assert not (tmp_path / "out" / "x.png").exists()
    assert not (tmp_path / "out" / "exported").exists()


def test_a_run_folder_that_is_a_link_of_its_user_is_read(
    strange: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "linked").symlink_to(strange)
    (tmp_path / "out").mkdir()
    found = answers(tmp_path / "linked", tmp_path / "out", capsys)
    assert {name: code for name, (code, _) in found.items() if code} == {}
    assert (tmp_path / "out" / "exported" / "samples.png").read_bytes() == (
        strange / "samples" / "step-00000002.png"
    ).read_bytes()


READERS = {
    "open",
    "read_text",
    "read_bytes",
    "read_bounded",
    "glob",
    "rglob",
    "iterdir",
    "copyfile",
    "safe_open",
    "load",
}
"""Calls that open a file or list a folder by its path."""
ALLOWED = {
    # Functions of the packages that read run folders which open something else, or what run_files has opened.
    "api/data_set.py": {"_decoded"}, "api/training.py": {"train"}, "dashboard/access.py": {"is_own"},
    "export/model_card.py": {"files_in", "files_of_export"}, "checkpoint/reader.py": {"_handle"},
    "checkpoint/safetensors_writer.py": {"write_tensors"},
    "dashboard/page_files.py": {"page_file", "_names"}, "dashboard/pictures.py": {"_header", "_smaller"},
    "dashboard/folders.py": {"runs_in"}, "dashboard/status.py": {"_has_open"},
    "checkpoint/manifest.py": {"_problem_of"}, "checkpoint/step_folders.py": {"drop_leftovers"},
    "ledger/records.py": {"_ends_whole", "process_began"}, "evaluation/validation_files.py": {"read"},
    "config/run_record.py": {"claim", "require_run"}, "json_lines.py": {"_cut", "_replace_end"},
}  # fmt: skip
PACKAGES = ("api", "checkpoint", "dashboard", "ledger")
MODULES = (
    "evaluation/validation_files.py", "evaluation/comparison.py", "evaluation/forecast.py", "config/run_record.py",
    "export/model_card.py", "sampling/run.py", "training/trackers/identity.py", "json_lines.py",
)  # fmt: skip


def test_every_reader_of_a_run_folder_is_listed() -> None:
    """What is not in the list reads through ``run_files``; what is, opens a file that is none of the run's."""
    packages = [path for package in PACKAGES for path in sorted((ROOT / "fastdiff" / package).rglob("*.py"))]
    found: dict[str, set[str]] = {}
    for path in [*packages, *(ROOT / "fastdiff" / name for name in MODULES)]:
        for function in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)):
            calls = {call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
                     for call in ast.walk(function) if isinstance(call, ast.Call)}  # fmt: skip
            if calls & READERS:
                found.setdefault(str(path.relative_to(ROOT / "fastdiff")), set()).add(function.name)
    unlisted = {name: functions - ALLOWED.get(name, set()) for name, functions in found.items()}
    assert {name: functions for name, functions in unlisted.items() if functions} == {}
