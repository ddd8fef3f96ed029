"""``fastdiff completion``: asked of the shells themselves."""

import contextlib
import shutil
import subprocess
from pathlib import Path

import pytest

from fastdiff.cli.main import main

_ASKED = {
    "fastdiff ex": {"export"},
    "fastdiff train --optim.we": {"--optim.weight-decay"},
    "fastdiff train --preset dit-x": {"dit-xl-2-256", "dit-xl-2-256-fast", "dit-xl-4-256", "dit-xl-8-256"},
    "fastdiff train --optim.name ": {"adamw", "adamw8bit", "adamw8bit-bnb", "muon", "muon-bf16", "muon8bit"},
    "fastdiff train --model.no-re": {"--model.no-resblock-updown"},
    "fastdiff plan --objective.pred": {"--objective.prediction"},
    "fastdiff sample RUN --model.cl": {"--model.classes"},
    "fastdiff bench step --pe": {"--peer"},
    "fastdiff launch slurm --part": {"--partition"},
    "fastdiff export RUN OUT --format dit": {"dit", "dit-training"},
    "fastdiff encode pictures OUT --qu": {"--quiet"},
    "fastdiff encode pict": {"pictures"},
}
_BASH = """
source "$1"
asked() {
    read -ra COMP_WORDS <<< "$1"
    [[ "$1" == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMP_LINE=$1; COMP_POINT=${#1}; COMPREPLY=()
    "$(complete -p fastdiff | sed 's/.*-F \\([^ ]*\\).*/\\1/')" fastdiff "${COMP_WORDS[COMP_CWORD]}"
    printf '%s\\n' "${COMPREPLY[@]}"
}
asked "$2"
"""
_FISH = 'source $argv[1]; complete -C "$argv[2]" | string split -f1 \\t | string trim -r -c /; true'


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script of each shell, and something to complete."""
    folder = tmp_path_factory.mktemp("completion")
    (folder / "pictures").mkdir()
    for shell in ("bash", "zsh", "fish"):
        with (folder / shell).open("w") as script, contextlib.redirect_stdout(script):
            assert main(["completion", shell]) == 0
    return folder


@pytest.mark.parametrize("line", _ASKED)
def test_bash_completes_commands_flags_values_and_files(scripts: Path, line: str) -> None:
    assert _answer(["bash", "--norc", "-c", _BASH, "bash", "./bash", line], scripts) == _ASKED[line]


@pytest.mark.shell
@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize("line", _ASKED)
def test_fish_does(scripts: Path, line: str) -> None:
    assert _answer(["fish", "--no-config", "-c", _FISH, "fish", line], scripts) == _ASKED[line]


@pytest.mark.shell
@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_reads_its_script(scripts: Path) -> None:
    subprocess.run(["zsh", "--no-rcs", "-n", "zsh"], cwd=scripts, check=True, timeout=60)


def _answer(command: list[str], folder: Path) -> set[str]:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())
