"""Lets torch.compile find its C++ code compiled without a process of the compiler.

Torch asks the compiler for its version in every process, and preprocesses its own headers before it looks for the code,
to see whether precompiled headers are stale. The answers are kept with the code, because both belong to one compiler.
"""

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fastdiff.files import publish

_ANSWERS = "compiler.json"
_QUESTIONS = frozenset({"--version", "-v"})


@contextmanager
def without_compiler(folder: Path, headers: Path | None) -> Iterator[None]:
    """Keep the compiler's answers in ``folder``.

    Args:
        folder: with the code.
        headers: where to precompile headers, instead of torch's own folder, which a killed compiler leaves with half of
            one, and every later compilation fails; None: they are not precompiled, and each kernel that is compiled
            takes half a second more.
    """
    from torch._inductor import codecache, cpp_builder  # their import takes seconds

    builder, codes = vars(cpp_builder), vars(codecache)
    patched: dict[str, Any] = {"_precompile_header": _as_it_is}
    if headers is not None:
        patched = {"_HEADER_DIR": str(headers), "_HEADER_LOCK_DIR": str(headers / "locks")}
    before, asked = {name: codes[name] for name in patched}, builder["subprocess"]
    forget = codes["_precompile_header"].cache_clear  # torch keeps the paths for the process; ours may be deleted
    forget()
    builder["subprocess"] = _Answers(folder / _ANSWERS)
    codes.update(patched)
    try:
        yield
    finally:
        builder["subprocess"] = asked
        codes.update(before)
        forget()


def _as_it_is(header: str, *_: Any, **__: Any) -> str:
    """Return what code includes in place of a precompiled header."""
    return header


class _Answers:
    """The module ``subprocess`` for torch's C++ builder, which asks the compiler each question once per file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def check_output(self, command: Sequence[str], **options: Any) -> Any:
        """Return the output of the command, or what it was before for a question about the compiler."""
        if len(command) != 2 or command[1] not in _QUESTIONS:
            return subprocess.check_output(command, **options)
        answers, question = self._read(), f"{command[0]} {command[1]} {options.get('stderr')}"
        if question not in answers:
            answers[question] = subprocess.check_output(command, **options).decode("latin-1")
            with suppress(OSError):  # it is asked again
                publish(self._path, json.dumps(answers).encode(), 0o600, masked=False, durable=False)
        return answers[question].encode("latin-1")

    def _read(self) -> dict[str, str]:
        with suppress(OSError, ValueError):
            found = json.loads(self._path.read_bytes())
            return found if isinstance(found, dict) else {}
        return {}
