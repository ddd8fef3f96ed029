"""Nothing leads to a package index, a repository or an address under a name that a stranger holds or may take."""

import re
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fastdiff import optional_packages
from tests.support.installed import wheels
from tests.support.processes import ROOT
from tests.support.servers import loopback
from tests.support.servers.loopback import Quiet

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTALLING = re.compile(
    r"(?:pip|uv|pipx|conda)\b[^\n`;]*\binstall\b[^\n`;]*?[\s'\"=]fastdiff(?:[-_]\w+)?(?![\w./-])", re.IGNORECASE
)
"""A command that resolves a distribution of ours by its name."""
EXTRA = re.compile(r"(?<![\w./-])fastdiff(?:[-_]\w+)?\[[a-z][a-z0-9,_-]*\]")
ADDRESS = re.compile(r"https?://(?:[^\s/@]+@)?([\w.-]+)(?:/([\w.-]+))?", re.IGNORECASE)
MAIL = re.compile(r"[\w.+-]+@[\w-]+\.(?:com|org|net|io|dev|ai)\b")
OWNERS = {
    "AI-Hypercomputer", "TensorAuto", "chuanyangjin", "facebookresearch", "huggingface", "kohya-ss", "mosaicml",
    "prometheus", "pytorch", "toshas",
}  # fmt: skip
"""Accounts of GitHub whose projects the documents cite."""
HOSTS = {
    "docs.pytorch.org", "download.pytorch.org", "json-schema.org", "keepachangelog.com", "prometheus.io", "pytorch.org",
    "semver.org", "ui.perfetto.dev", "www.apache.org", "www.w3.org",
}  # fmt: skip
RESERVED = re.compile(r"\d+(\.\d+)*\.?|\w+|[\w.-]+\.(test|example|invalid|localhost)|[\w.-]*example\.(com|org|net)")
"""Hosts that are no domains of anybody: numbers, names without a dot, reserved names."""


def texts() -> Iterator[tuple[str, str]]:
    """Name and content of every text file of the repository, but this test."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    for name in names.splitlines():
        path = ROOT / name
        if path != Path(__file__) and path.is_file() and b"\0" not in (content := path.read_bytes()):
            yield name, content.decode()


def test_no_command_or_requirement_resolves_our_distribution_by_name() -> None:
    found = [
        f"{name}: {match[0]}"
        for name, text in texts()
        for pattern in (INSTALLING, EXTRA)
        for match in pattern.finditer(text)
    ]
    assert not found
    assert INSTALLING.search("pip install -U 'fastdiff[all]'")
    assert INSTALLING.search("pip install fastdiff-kernels")
    assert EXTRA.search("needs fastdiff[peft]")
    assert not INSTALLING.search("pip install ./kernels and -e /opt/fastdiff/x")


def test_every_address_belongs_to_somebody_whom_we_cite() -> None:
    found = []
    for name, text in texts():
        found += [f"{name}: {match[0]}" for match in MAIL.finditer(text) if not name.startswith("tests/")]
        for match in ADDRESS.finditer(text):
            host, first = match[1].lower(), match[2]
            known = first in OWNERS if host in ("github.com", "raw.githubusercontent.com") else host in HOSTS
            if not known and not RESERVED.fullmatch(host):
                found.append(f"{name}: {match[0]}")
    assert not found


def test_remedies_are_the_extras_of_the_project() -> None:
    extras = PROJECT["optional-dependencies"]
    optional = {text for name in ("all", "cuda12", "cuda13") for text in extras[name] if not text.startswith("torch<")}
    optional -= {text for text in optional if re.match(r"torch\b", text)}
    assert set(optional_packages._REQUIREMENTS.values()) == optional
    (torch,) = (text for text in PROJECT["dependencies"] if re.match(r"torch\b", text))
    for cuda in optional_packages.CUDA_VERSIONS:
        own, *others = optional_packages._OF_CUDA[cuda]
        (narrower, *same) = extras[f"cuda{cuda}"]
        assert others == same
        assert set(own.removeprefix("torch").split(",")) < {*torch[5:].split(","), *narrower[5:].split(",")}
    attention = (ROOT / "kernels" / "fastdiff_kernels" / "attention.py").read_text()
    assert optional_packages.pip_install("xformers") in attention, "the kernels import nothing of fastdiff"


@contextmanager
def refusing_index() -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a package index on loopback that has no package, and the paths that it was asked for."""
    asked: list[str] = []

    class Refusing(Quiet):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

    with loopback.serve(Refusing) as server:
        yield f"{server.address}/", asked


@pytest.mark.nightly
def test_the_wheel_asks_an_index_for_nothing_under_our_name(tmp_path: Path) -> None:
    """With every extra of users; the libraries are installed, so pip asks only for what is missing."""
    wheel = wheels.build(tmp_path / "dist")
    environment = wheels.Environment(tmp_path / "venv", wheel)
    with refusing_index() as (index, asked):
        install = [*environment.pip, "install", "--dry-run", "--index-url", index, "--retries", "0"]
        wanted = f"{wheel}[cuda13,all]"
        done = subprocess.run(
            [*install, "--force-reinstall", "--no-deps", wanted], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        done = subprocess.run([*install, wanted], capture_output=True, text=True, timeout=300)
        assert not [path for path in asked if "fastdiff" in path.lower()], done.stderr
        subprocess.run([*install, PROJECT["name"] + "-none"], capture_output=True, timeout=300)
        assert asked, "the index is the one that pip asks"
