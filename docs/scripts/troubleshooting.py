"""The page of all error messages, from the code: ``python docs/scripts/troubleshooting.py`` writes it anew.

A message is the text of an error of ``fastdiff.errors`` where it is made. What a run fills in stands in capitals.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
CODES = {
    "PluginError": 1, "ConfigError": 2, "DataError": 65, "NodeError": 69, "DivergedError": 70, "NoMemoryError": 70,
    "ProcessLimitError": 71, "StorageError": 74, "Preempted": 75,
}  # fmt: skip
"""Errors and their exit codes; ``test_docs_site`` compares them with the classes."""
MEANINGS = {
    1: "Your own code failed, or fastdiff has a bug; then there is a traceback. The checkpoints are intact: the same "
    "command resumes.",
    2: "The command line, a configuration file, the machine or the run folder does not fit. Nothing was changed. "
    "Correct it and start again.",
    65: "Data or weights are missing, damaged or of another shape than declared. `fastdiff verify` reads every byte "
    "of a data set or of a run.",
    69: "A node does not answer, or a rank hangs; the stacks of its processes are in `RUN/stacks/`. The checkpoints "
    "are intact: the same command resumes.",
    70: "The training diverged, or ran out of memory in a way that smaller micro-batches do not solve. The checkpoints "
    "are intact.",
    71: "No more threads or processes may be started. Raise the limit that the message names, or end other processes.",
    74: "A file could not be written or read back. The checkpoints before it are intact; the same command resumes.",
    75: "The run was asked to stop and has saved. It is no error: the same command resumes.",
}
SUBJECTS = {
    "config/networks": "Networks", "config/objective.py": "Objectives and timesteps",
    "config/timesteps.py": "Objectives and timesteps", "config/deepspeed.py": "DeepSpeed configurations",
    "config": "Flags and configuration files", "data/encoding": "Encoding images", "data/images": "Images and captions",
    "data/shards": "Data sets on disk", "data": "Loading of samples", "models/pretrained": "Pretrained weights",
    "models": "Networks in memory, kernels, compilers", "diffusion": "Objectives and timesteps",
    "checkpoint": "Checkpoints", "training": "Training", "train.py": "Training", "parallel": "Devices and ranks",
    "cluster/launchers": "Launchers: ssh, Slurm, Kubernetes", "cluster": "Supervisors and pre-flight",
    "sampling": "Sampling", "evaluation": "Evaluation", "export": "Export", "planning": "Plans", "ledger": "Ledger",
    "plugins": "Your own code in a run", "api": "The interface for Python", "dashboard": "The page of runs",
    "cli/compat": "Translation of other trainers", "cli": "Commands", "": "Files",
}  # fmt: skip
"""Heading by the longest matching path of the module."""
_HEAD = """\
# Troubleshooting

<!-- Written by docs/scripts/troubleshooting.py from the messages in the code. -->

An error of fastdiff is one message: what was given, what is wrong with it, and what to do. This page lists every
message by exit code and subject. Search for some words of yours: what a message fills in stands here in capitals, such
as *PATH*; ... is a text with cases of its own. Behind the arrow is the remedy. A traceback is a bug in fastdiff (exit
code 1). [Reliability](reliability.md#messages-and-exit-codes) says who ends with which code.

`fastdiff doctor` looks for the GPU, the compilers and the libraries of a machine, and says what is missing.
"""


@dataclass(frozen=True, order=True)
class Message:
    """A message in the code."""

    code: int
    subject: str
    text: str


def messages() -> list[Message]:
    """Return all messages, sorted, each once."""
    found = set()
    for path in sorted((ROOT / "fastdiff").rglob("*.py")):
        module = path.relative_to(ROOT / "fastdiff").as_posix()
        for name, node in _errors(ast.parse(path.read_text())):
            text = " ".join(template(node).split())
            if re.search(r"[a-z]{3}", text):
                found.add(Message(CODES[name], _subject(module), text))
    return sorted(found)


def _errors(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the kind and the text of every error that a module makes."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id in CODES and node.args:
            yield node.func.id, node.args[0]
        elif node.func.id == "require" and len(node.args) == 2:
            yield "ConfigError", node.args[1]


def _subject(module: str) -> str:
    fitting = [start for start in SUBJECTS if module == start or module.startswith(f"{start}/") or not start]
    return SUBJECTS[max(fitting, key=len)]


def template(node: ast.expr) -> str:
    """Return the text of an expression, with capitals for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    if isinstance(node, ast.FormattedValue):
        return _placeholder(node.value)
    return _placeholder(node)


def _placeholder(node: ast.expr) -> str:
    """Return a name in capitals for an expression; three dots for one without a name."""
    match node:
        case ast.Constant():
            return str(node.value)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_").upper()
        case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="join"), args=[first]):
            return _placeholder(first)
        case ast.Call(func=ast.Attribute(value=value), args=arguments) if all(
            isinstance(argument, ast.Constant) for argument in arguments
        ):
            return _placeholder(value)  # text.replace("_", "-")
        case ast.Call(args=[first, *_]):
            return _placeholder(first)
        case ast.Call(func=function):
            return _placeholder(function)
        case ast.Subscript(value=value) | ast.Starred(value=value) | ast.BinOp(left=value):
            return _placeholder(value)
        case ast.GeneratorExp(generators=[first, *_]) | ast.ListComp(generators=[first, *_]):
            return _placeholder(first.iter)
    return "..."


def page() -> str:
    """Return the page."""
    by_code: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for message in messages():
        by_code[message.code][message.subject].append(message.text)
    parts = [_HEAD]
    for code, subjects in sorted(by_code.items()):
        parts.append(f"## Exit code {code}\n\n{MEANINGS[code]}\n")
        for subject, texts in sorted(subjects.items()):
            parts.append(f"### {subject} ({code})\n\n" + "\n".join(map(_item, texts)) + "\n")
    return "\n".join(parts)


def _item(text: str) -> str:
    cause, _, remedy = text.rpartition("; ")
    lines = [cause, f"→ {remedy}"] if cause else [text]
    return f"- {'<br>'.join(map(_marked, lines))}"


def _marked(text: str) -> str:
    """Return a text as Markdown: capitals of a placeholder in italics, flags and quoted commands as code."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if piece.startswith("`") and len(piece) > 1 else _prose(piece) for piece in pieces)


def _prose(text: str) -> str:
    text = re.sub(r"([\\*_\[\]<>|`])", r"\\\1", text)
    text = re.sub(r"(?<![\w-])(--[a-z](?:[\w.-]|\\_)*[\w])", lambda m: f"`{m[1].replace(chr(92), '')}`", text)
    return re.sub(r"(?<![\w`./-])([A-Z](?:[A-Z0-9]|\\_)+)(?![\w`])", r"*\1*", text)


if __name__ == "__main__":
    PAGE.write_text(page())
