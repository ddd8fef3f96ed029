"""Random command lines of all commands, from their own parsers, and processes that run them under limits."""

import argparse
import contextlib
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.forked import WITHOUT_GPU, fork_server

SECRET = "aKIAh4mSTERw0rd"
CPU_S = 20
_WALL_S = 300
_MEMORY = 24 << 30
_FILE = 64 << 20
ADDRESSES = (
    f"http://u:{SECRET}@127.0.0.1:9/x",
    f"http:/u:{SECRET}@127.0.0.1:9/x.tar",
    f"HTTPS://u:s/{SECRET}@h/x",
    f"s3://k:{SECRET}@b/x",
    f"gs://b/x?sig={SECRET}",
    f"https://h/x;token={SECRET}",
    f"http://[::1/x?X-Amz-Signature={SECRET}",
    f"http:/h/x?se=1&sp=r&sv=2&sig={SECRET}",
)
_HOSTILE = (
    "", " ", "-", "0", "-1", "nan", "inf", "1e400", "1e12", "1000000000000", "9" * 5000, "a" * 300, "a/" * 3000,
    "../x", "/dev/null", "/dev/zero", "/proc/self/mem", "\u202ex", "日本", "x\udcff", "a\nb", "{0..99999999999}.tar",
    "{a,b}{a,b}" * 20 + ".tar", "%s", "@x", "[]", "~", "0-99999999999", "99999,99999,99999", "True", "None",
    "http://[::1/x", "x.png", "x.xyz", "x.npz", "x.safetensors", "x.py:f", "a" * 300 + ".png",
)  # fmt: skip
_ORDINARY = ("1", "2", "3", "8", "0.5", "digits", "synthetic", "none", "fp32", "1,8,8", "0-3", "ddim", "org/model", "a")


Command = tuple[list[str], argparse.ArgumentParser]
"""The words of a command and its parser."""


@dataclass(frozen=True)
class Line:
    """A command line: ``train`` or ``fastdiff`` and its arguments."""

    program: str
    words: list[str]


@dataclass(frozen=True)
class Answer:
    """What came of a command line."""

    line: Line
    code: int
    """Exit code, or minus the number of a signal."""
    output: str
    cpu_s: float


def random_lines(seed: int, count: int, there: Sequence[Path]) -> list[Line]:
    """Return ``count`` command lines; ``there`` are existing files and folders that arguments may name."""
    draw = random.Random(seed)
    parsers = list(_commands())
    flags = _train_flags()
    pool = [str(path) for path in there]
    return [_line(draw, parsers, flags, pool) for _ in range(count)]


def _line(draw: random.Random, parsers: list[Command], flags: list[str], there: list[str]) -> Line:
    number = draw.randrange(len(parsers) + 3)
    if number >= len(parsers):
        return Line("train", _train(draw, flags, there))
    words, parser = parsers[number]
    found, last = list(words), []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        if action.nargs == argparse.REMAINDER:
            # The last one is wrong: nothing starts.
            last = ["--", *_train(draw, flags, there), "--wrong"] if "launch" in words else ["--", "--wrong"]
        elif not action.option_strings:
            found.append(_value(draw, action.choices, there))
        elif action.required or draw.random() < 0.25:
            found.append(draw.choice(action.option_strings))
            if action.nargs != 0:
                found.append(_value(draw, action.choices, there))
    if words[0] == "bench":
        found += ["--wrong", _value(draw, None, there)]
    return Line("fastdiff", found + last)


def _train(draw: random.Random, flags: list[str], there: list[str]) -> list[str]:
    found = ["--preset", draw.choice(("digits", "digits", "digits", _value(draw, None, there)))]
    for _ in range(draw.randrange(4)):
        found += [draw.choice(flags), _value(draw, None, there)]
    return [*found, "--dry-run"]


def _value(draw: random.Random, choices: Any, there: list[str]) -> str:
    if choices and draw.random() < 0.8:
        return str(draw.choice(list(choices)))
    return draw.choice(draw.choice((_ORDINARY, _HOSTILE, ADDRESSES, there)))


def _commands() -> Iterator[Command]:
    """Yield the words of every command with its parser."""
    from fastdiff.cli import main
    from fastdiff.cli.compat.run import SCRIPTS

    def leaves(words: list[str], parser: argparse.ArgumentParser) -> Iterator[Command]:
        [*below] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if not below:
            yield words, parser
        for action in below:
            for name, inner in action.choices.items():
                yield from leaves([*words, name], inner)

    yield from leaves([], main._parser())
    for name, (add_flags, *_) in SCRIPTS.items():
        parser = argparse.ArgumentParser(add_help=False)
        add_flags(parser)
        yield ["compat", name, "--"], parser


def _train_flags() -> list[str]:
    from fastdiff.checkpoint.unchanged import flatten
    from fastdiff.config.command_line import train_flags
    from fastdiff.config.presets import preset
    from fastdiff.config.run_record import as_json

    own = [action.option_strings[0] for action in train_flags.pre_parser()._actions]
    return sorted({*own, *(f"--{name}" for name in flatten(as_json(preset("digits"))))} - {"--preset", "--local_rank"})


def answers(lines: Sequence[Line], folder: Path) -> list[Answer]:
    """Run each line in a process of its own, in an empty folder below ``folder``."""
    results = folder / "answers.jsonl"
    process = fork_server().Process(target=_serve, args=(list(lines), folder, results, dict(os.environ)))
    process.start()
    try:
        process.join()
    finally:
        process.kill()
        process.join()
    found = [json.loads(text) for text in results.read_text().splitlines()]
    assert len(found) == len(lines), f"the server of the command lines ended with {process.exitcode}"
    return [Answer(line, **answer) for line, answer in zip(lines, found, strict=True)]


def _serve(lines: list[Line], folder: Path, results: Path, environment: dict[str, str]) -> None:
    os.environ.clear()
    nowhere = {"PATH": "/nowhere", "HF_HUB_OFFLINE": "1", "AWS_EC2_METADATA_DISABLED": "true", "OMP_NUM_THREADS": "1"}
    nowhere |= dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")  # refuses connections
    os.environ.update(environment | WITHOUT_GPU | nowhere | {"HOME": str(folder), "HF_HOME": str(folder / "hub")})
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    import huggingface_hub.constants
    import torch

    huggingface_hub.constants.HF_HUB_OFFLINE = True  # which was read from the environment of the server

    import fastdiff.cli.main
    import fastdiff.train

    torch.set_num_threads(1)
    with results.open("w") as file:
        for number, line in enumerate(lines):
            own = folder / str(number)
            own.mkdir()
            code, output, cpu_s = _run(fastdiff, line, own)
            file.write(json.dumps({"code": code, "output": output, "cpu_s": cpu_s}) + "\n")
            file.flush()


def _run(program: Any, line: Line, folder: Path) -> tuple[int, str, float]:
    log = folder.with_suffix(".log")
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            _limited(log, folder)
            _end(program.train.main if line.program == "train" else program.cli.main.main, line.words)
        os._exit(99)
    deadline = time.monotonic() + _WALL_S
    while True:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it may have started
    return os.waitstatus_to_exitcode(status), log.read_text(errors="backslashreplace"), usage.ru_utime + usage.ru_stime


def _limited(log: Path, folder: Path) -> None:
    """Give this process its own output and session, and limits of time, memory and files."""
    os.setsid()
    os.chdir(folder)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for kind, most in (
        (resource.RLIMIT_CPU, CPU_S),
        (resource.RLIMIT_AS, _MEMORY),
        (resource.RLIMIT_FSIZE, _FILE),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def _end(main: Callable[[Sequence[str]], int], words: Sequence[str]) -> None:
    code: Any
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)
