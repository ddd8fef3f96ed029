"""The documents: their length, links, paths and names, and their commands, are those of the tree."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from fastdiff.cli.machines import plan
from fastdiff.cli.main import _parser
from fastdiff.config.command_line.train_flags import parse
from fastdiff.config.presets import PRESETS, preset
from tests.support.installed.standins import write_network

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "deepspeed_configs" / "README.md",
    ROOT / "kernels" / "README.md",
]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
_PACKAGES = ("fastdiff", "kernels/fastdiff_kernels", "bench/fastdiff_bench")
BASES = (ROOT, ROOT / "bench", *(ROOT / name for name in _PACKAGES))
"""Folders to which a path in a document may be relative."""
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
UNDER_ROOT = re.compile(
    r"(?<![\w/.:<-])((?:fastdiff|kernels|bench|tests|docs|deepspeed_configs|\.ci)/[\w./-]*[\w/])(?![\w<>{])"
)
MODULE = re.compile(r"(?<![\w/.])((?:\w+/)+\w+\.py)\b")
ROOM = re.compile(r"`((?:\w+/)+)`")
OUTSIDE = {"tensorboard/", "samples/", "RUN/stacks/", "dist/"}
"""Folders of a run, and of the wheel that is built."""
TEST_MODULE = re.compile(r"`(test_\w+)`")

documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert text.count("![") == 1
    assert "\nmake demo" in text
    assert "\nmake test" in text


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    plain = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.lower()))
    return plain.strip().replace(" ", "-")


@cache
def anchors(path: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


@documents
def test_links_lead_somewhere(document: Path) -> None:
    for link in LINK.findall(document.read_text()):
        if re.match(r"https?:|mailto:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (document.parent / target).resolve() if target else document
        assert path.exists(), link
        assert not anchor or anchor in anchors(path), link


@documents
def test_paths_exist(document: Path) -> None:
    text = LINK.sub(r"", document.read_text())
    named = {*UNDER_ROOT.findall(text), *MODULE.findall(text), *ROOM.findall(text)} - OUTSIDE
    missing = [path for path in sorted(named) if not any((base / path).exists() for base in (*BASES, document.parent))]
    assert not missing


@documents
def test_named_tests_exist(document: Path) -> None:
    existing = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert sorted(set(TEST_MODULE.findall(document.read_text())) - existing) == []


def rows() -> Iterator[tuple[list[str], list[Path]]]:
    """The names in code and the linked modules of each row of a table, or sentence, of the page on the architecture."""
    for line in ARCHITECTURE.splitlines():
        links = [(ROOT / "docs" / link).resolve() for link in LINK.findall(line) if link.endswith(".py")]
        names = re.findall(r"(?<!\[)`(_?[A-Za-z]\w*(?:\.\w+)?)`", line)
        if line.startswith("| ") and links and names:
            yield names, links


def test_functions_are_in_the_files_that_are_named_for_them() -> None:
    found, missing = list(rows()), []
    assert len(found) > 20
    for names, files in found:
        source = "\n".join(file.read_text() for file in files if file.exists())
        defined = {
            *re.findall(r"(?:^|\n) *(?:class|def) (\w+)", source),
            *re.findall(r"\n(\w+)(?:: [^=\n]+)? = ", source),
        }
        missing += [name for name in names if not set(name.split(".")) <= {*defined, "DataError"}]
    assert not missing


def commands() -> Iterator[str]:
    """Every command in the blocks of the documents, a line each, without its comment."""
    for document in DOCUMENTS:
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL):
            for line in [] if language else block.replace("\\\n", " ").splitlines():
                yield re.sub(r"\s+#.*", "", line).strip()


TRAINING = sorted({line for line in commands() if re.search(r"fastdiff\.train\b(?!\()|^fastdiff (launch|train)", line)})
OTHERS = sorted(
    {
        line[line.index("fastdiff ") :]
        for line in commands()
        if re.search(r"(^|-- |\d )fastdiff (?!launch|train|bench)", line)
    }
)


@pytest.fixture
def with_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with the own network of the page on Python."""
    write_network(tmp_path / "net.py")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("with_own_code")
@pytest.mark.parametrize("command", TRAINING)
def test_training_commands_parse(command: str) -> None:
    words = shlex.split(command)
    if words[:2] == ["fastdiff", "train"]:
        flags = _parser().parse_args(words[1:]).flags
    elif words[0] == "fastdiff":
        flags = words[words.index("--") + 1 :]
        assert _parser().parse_args(words[1:]).run
    else:
        flags = words[words.index("fastdiff.train") + 1 :]
    if not {"--help", "--help-all"} & set(flags):
        parse(flags)


@pytest.mark.usefixtures("with_own_code")
@pytest.mark.parametrize("command", OTHERS)
def test_commands_parse(command: str) -> None:
    words = shlex.split(command)[1:]
    if words[0] == plan.NAME:
        parse(_parser().parse_args(words).flags)
    assert _parser().parse_args(words).run


def test_the_table_of_presets_is_that_of_the_presets() -> None:
    text = (ROOT / "docs" / "recipes" / "index.md").read_text()
    table = re.findall(r"^\| (`.+`) \| .+ \| ([\d,]+) \| (\d+) \| (\S+) \|$", text, re.MULTILINE)
    named = [(name, *numbers) for names, *numbers in table for name in re.findall(r"`([^`]+)`", names)]
    assert sorted(name for name, *_ in named) == sorted(PRESETS)
    for name, steps, batch, rate in named:
        config = preset(name)
        assert config.samples == int(steps.replace(",", "")) * int(batch) == config.batch.samples * config.steps, name
        assert config.optim.lr == float(rate), name
