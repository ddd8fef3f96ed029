"""The commands of a document, run one after another in a folder of their own."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.installed import standins
from tests.support.installed.wheels import Environment

_KNOWN = re.compile(r"(fastdiff|srun .*fastdiff|torchrun .*fastdiff|deepspeed .*fastdiff|cp)[ .]")
_LIMIT_S = 900


def commands(document: Path) -> list[str]:
    """Return every command in the blocks of a document that have no language or a shell's, without its comment."""
    found = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL):
        if language not in ("", "bash", "sh", "console"):
            continue
        lines = (re.sub(r"\s+#.*", "", line).strip() for line in block.replace("\\\n", " ").splitlines())
        found += [re.sub(r"\s+", " ", line) for line in lines if line]
    return found


def reason_against(command: str) -> str | None:
    """Return why a command is not run; None: it is."""
    return next((reason for start, reason in standins.NOT_RUN.items() if re.match(start, command)), None)


class Folder:
    """A working folder, in which commands find what earlier ones left, and otherwise stand-ins."""

    def __init__(self, path: Path, environment: Environment) -> None:
        """Create the folder."""
        self.path, self._environment = path, environment
        path.mkdir()
        (path / standins.FEATURES).write_text(standins.FEATURES_TEXT)

    def problems(self, document: Path) -> Iterator[str]:
        """Run the commands of a document; yield what is wrong with each that does not end with 0 or is not known."""
        for command in commands(document):
            if reason_against(command) is None:
                yield from self._run(command)

    def _run(self, command: str) -> Iterator[str]:
        if not _KNOWN.match(command):
            yield f"{command}\n    is unknown: give it a stand-in, or a reason not to be run (standins.NOT_RUN)"
            return
        line = standins.command_of(command)
        yield from self._inputs(f"{command} {line}")
        try:
            done = self._environment.run(["bash", "-c", line], self.path, _LIMIT_S)
        except subprocess.TimeoutExpired:
            yield f"{command}\n    as: {line}\n    did not end in {_LIMIT_S} s"
            return
        if done.returncode:
            last = "\n".join([*done.stdout.splitlines()[-6:], *done.stderr.splitlines()[-12:]])
            yield f"{command}\n    as: {line}\n    ended with {done.returncode}:\n{last}"

    def _inputs(self, command: str) -> Iterator[str]:
        """Make what a command reads and nothing has made yet."""
        for word in (quoted.strip("'\"") for quoted in re.split(r"[ =]", command)):
            file = self.path / word
            if not word or word.startswith("-") or file.exists() or _writes(command, word):
                continue
            if word in standins.FILES:
                file.parent.mkdir(parents=True, exist_ok=True)
                standins.FILES[word](file)
            for made in standins.MADE.get(word, ()):
                yield from self._run(made)


def _writes(command: str, word: str) -> bool:
    """Whether a word names an output of its command."""
    out = re.escape(word)
    return bool(
        re.search(
            rf"(--npz|--output\.folder|--out) {out}( |$)|(fastdiff (encode|export|convert)|cp) \S+ {out}( |$)", command
        )
    )
