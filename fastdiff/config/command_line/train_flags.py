"""The command line of ``train.py``."""

import argparse
import inspect
import io
import json
import os
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, fields
from functools import partial
from typing import NoReturn

import tyro

from fastdiff import sanitize
from fastdiff.config import deepspeed as deepspeed_config
from fastdiff.config.arguments.types import Parser, add_verbosity
from fastdiff.config.arguments.unknown import explained
from fastdiff.config.command_line import config_file
from fastdiff.config.command_line.data_set import data_flags, network_flags
from fastdiff.config.command_line.run_length import add_run_length, samples_flag, sets_samples
from fastdiff.config.command_line.short_help import short_help
from fastdiff.config.engine import require_engine
from fastdiff.config.launch_options import HANG_TIMEOUT_S, Launch
from fastdiff.config.local_paths import require_local
from fastdiff.config.networks.user_defined import add_network
from fastdiff.config.optimizers.registry import optimizer_class, package_of
from fastdiff.config.presets import PRESETS, preset, shown_presets
from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import as_json
from fastdiff.config.sections.objective import DEFAULTS, PROCESSES, Process, without_defaults_of_others
from fastdiff.config.trackers import warn_of_problems
from fastdiff.errors import ConfigError
from fastdiff.plugins.user_code import names_file

_SHORT_HELP = {"-h", "--help"}
_HELP = _SHORT_HELP | {"--help-all"}
_WIDE = 1 << 20
"""Columns; no argument is longer."""


_OF_TYRO = (
    (r"no type matching (.*?) could be instantiated from \[(.*?)\]\. .*", r"expected \1, given \2"),
    (r"could not convert string to float: (.*)", r"expected a number, given \1"),
    (r"invalid literal for int\(\) with base 10: (.*)", r"expected a whole number, given \1"),
    (r"invalid choice '(.*)' for argument '(\S+)'\. Expected one of \((.*)\)", r"\2: expected one of \3, given \1"),
    (r"Missing value for argument '(\S+)'.*", r"\1: its value is missing"),
)
"""Reasons of Python and tyro, and ours."""


def parse(argv: Sequence[str], beside: Collection[str] = ()) -> tuple[Launch, RunConfig]:
    """Parse the command line of ``train.py``.

    A pre-pass reads the arguments of the ``deepspeed`` launcher and the flags that choose the defaults, among them
    ``--objective.process`` and ``--optim.name``, which decide the types of these sections. tyro parses the rest.
    Precedence: preset < data set (``flags.data_set``) < ``--config`` file < flags.

    Args:
        argv: the flags.
        beside: flags that the command takes as well, and has taken; an unknown one may be meant for them.

    Raises:
        ConfigError: unknown preset or flag, unreadable file, wrong or inconsistent values.
        SystemExit: 0 after ``--help`` or ``--help-all``.
    """
    own, rest = pre_parser().parse_known_args(list(argv))
    if own.preset is None and own.config is None and not _HELP & set(rest):
        raise ConfigError(f"--preset NAME (or --config FILE) is missing; presets: {shown_presets()}")
    require_local("--config", own.config or "")
    file = config_file.read(own.config, argv) if own.config else config_file.ConfigFile()
    name = own.preset or file.preset
    default = preset(name, "--preset" if own.preset else f"--config {own.config}: preset") if name else RunConfig()
    kind = add_network(own.kind, "--model.kind") if own.kind is not None and names_file(own.kind) else own.kind
    by_flag = own.steps or own.epochs or sets_samples(rest)
    steps, epochs = (own.steps, own.epochs) if by_flag else (file.steps, file.epochs)
    if own.optimizer is not None:  # a file without a name has its fields
        default = config_file.with_optimizer(default, own.optimizer, "--optim.name")
    if own.config:
        default = config_file.lay_unchecked(default, file.fields, f"--config {own.config}")
    if own.optimizer is not None:
        default = config_file.with_optimizer(default, own.optimizer, "--optim.name")
    if kind is not None:
        default = config_file.with_kind(default, {"model": {"kind": kind}}, "--model.kind")
    if own.process:
        default = config_file.with_process(default, own.process)
    default = config_file.with_one_source(default, data_flags(rest))
    if _SHORT_HELP & set(rest):
        _print_short_help(name, default)
    rest = _without_other_processes(rest, default.objective.process)
    source = "" if by_flag else f"--config {own.config}"
    rest += samples_flag(steps, epochs, rest, default.batch, default.data, name, source)
    rest += network_flags(rest, file.fields, default, name, resumes=own.resume != "never")
    blame = partial(config_file.blamed_on_file, fields=file.fields, flags=rest, source=f"--config {own.config}")
    config = _parse_fields(default, rest, _description(name), beside, blame if own.config else str)
    if not config.output.folder:
        raise ConfigError("--output.folder is missing: a run without a preset needs a folder, for example runs/first")
    path = own.deepspeed_config or (own.deepspeed if isinstance(own.deepspeed, str) else None)
    require_local("--deepspeed_config", path or "")
    raw = deepspeed_config.read(path) if path else None
    launch = Launch(
        deepspeed=raw,
        resume=own.resume,
        allow_change=tuple(own.allow_change),
        dry_run=own.dry_run,
        hang_timeout_s=own.hang_timeout,
        argv=tuple(argv),
        preset=name,
    )
    return launch, config


def _parse_fields(
    default: RunConfig, flags: Sequence[str], description: str, beside: Collection[str], blame: Callable[[str], str]
) -> RunConfig:
    """Return ``default`` with the fields that ``flags`` set; ``--help-all`` prints them on one rank, and ends.

    ``blame`` says whose values a message is about.

    Raises:
        ConfigError: an unknown flag, with the nearest or with ours for one of another trainer; or a wrong value.
    """
    shows_help = "--help-all" in flags
    parse: Callable[[], tuple[RunConfig, list[str]]] = partial(
        tyro.cli,
        RunConfig,
        prog="fastdiff train",
        description=description,
        default=default,
        args=["--help" if flag == "--help-all" else flag for flag in flags],
        return_unknown_args=True,
        config=(tyro.conf.AvoidSubcommands,),
    )
    if shows_help and os.environ.get("RANK", "0") == "0":
        parse()
    said = io.StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(said), _wide():
            config, unknown = parse()
    except ConfigError as error:
        raise ConfigError(blame(str(error))) from None
    except SystemExit as end:
        if not end.code:
            raise
        raise ConfigError(_reason(said.getvalue())) from None
    if unknown:
        raise ConfigError(explained(unknown, [*known_flags(default), *beside], "train", flags))
    return config


@contextmanager
def _wide() -> Iterator[None]:
    """Let tyro break no line: its boxes cut words, and credentials that are cut are not found."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(_WIDE)
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def _reason(box: str) -> str:
    """Return the reason in an error of tyro: a title, a rule, the reason, a rule and help; or a box with that title."""
    lines = [line.strip().strip("│").strip() for line in box.splitlines()]
    parts, boxed = [""], "╭" in box
    for line in lines:
        if line and not line.strip("─-"):
            parts.append("")
        elif line and line[0] not in "╭╰":
            parts[-1] += f"{line} "
    reason = (parts if boxed else [*parts[1:], parts[0]])[0].strip().removeprefix("Error parsing ").removesuffix(".")
    for pattern, ours in _OF_TYRO:
        reason = re.sub(pattern, ours, reason)
    return reason


def known_flags(default: RunConfig) -> list[str]:
    """Return all flags of a run with this network and process, with their hyphens."""
    fields = [f"--{name.replace('_', '-')}" for name in config_file.leaves(asdict(default))]
    return [*fields, *pre_parser()._option_string_actions]


def _print_short_help(name: str | None, default: RunConfig) -> NoReturn:
    """Print the short help on one rank and end the process."""
    if os.environ.get("RANK", "0") == "0":
        print(short_help(name, default))
    raise SystemExit(0)


def _description(name: str | None) -> str:
    """Text above the fields in ``--help-all``: the description of the preset, if one is given, and the other flags."""
    about = inspect.getdoc(PRESETS[name]) if name else None
    flags = pre_parser().format_help()
    # tyro joins lines that are not indented.
    return f"{textwrap.indent(about, '  ')}\n\n{flags}" if about else flags


def print_dry_run(config: RunConfig, ds_config: deepspeed_config.DsConfig) -> None:
    """Print the resolved configuration and the DeepSpeed JSON as one JSON object, on one rank.

    Raises:
        ConfigError: no engine can train the run as its flags ask; or the optimizer of another package has a wrong
            class, which is imported for this.
    """
    require_engine(config, ds_config)
    if package_of(config.optim.name) is not None:
        optimizer_class(config.optim)
    if os.environ.get("RANK", "0") == "0":
        resolved: dict[str, object] = {"config": as_json(config), "deepspeed": ds_config}
        if config.batch.micro == "auto":
            resolved["note"] = "micro-batch and accumulation are auto: a start decides them by the memory of the device"
        print(json.dumps(sanitize.tree(resolved, sanitize.argument), indent=2))
        warn_of_problems(config.output.report_to)


def pre_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags that are no fields of the run, or decide the types of its fields."""
    parser = Parser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    parser.add_argument("--preset", metavar="NAME", help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("--config", metavar="FILE", help="YAML or JSON with fields of the run, or a run.json")
    parser.add_argument(
        "--deepspeed_config",
        metavar="NAME|FILE",
        help=f"DeepSpeed configuration: {', '.join(deepspeed_config.named())}, or a JSON file; default: zero1",
    )
    parser.add_argument(
        "--resume",
        choices=("auto", "must", "never"),
        default="auto",
        help="auto: continue the run in the folder, if any; must: fail if there is none; never: fail if there is one",
    )
    parser.add_argument(
        "--allow-change",
        metavar="KEY",
        action="append",
        default=[],
        help="accept a change of this field in a resumed run",
    )
    add_run_length(parser)
    parser.add_argument("--objective.process", dest="process", choices=tuple(PROCESSES), help=argparse.SUPPRESS)
    parser.add_argument("--model.kind", dest="kind", help=argparse.SUPPRESS)
    parser.add_argument("--optim.name", dest="optimizer", help=argparse.SUPPRESS)
    add_verbosity(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument(
        "--hang-timeout",
        type=_seconds,
        metavar="SECONDS",
        default=HANG_TIMEOUT_S,
        help="end the run if a rank makes no progress for this long, and write the stacks of the ranks to RUN/stacks",
    )
    parser.add_argument("--deepspeed", nargs="?", const=True, help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser


def _without_other_processes(flags: Sequence[str], process: Process) -> list[str]:
    """Remove flags of other processes, which tyro does not know; ConfigError for another value than their defaults."""
    parser = Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    own = {field.name for field in fields(PROCESSES[process])}
    for name, value in DEFAULTS.items():
        if name in own:
            continue
        for written in {name, name.replace("_", "-")}:
            if isinstance(value, bool):
                parser.add_argument(f"--objective.{written}", action="store_true", dest=name)
                for no in ("no_", "no-"):
                    parser.add_argument(f"--objective.{no}{written}", action="store_false", dest=name)
            else:
                parser.add_argument(f"--objective.{written}", type=type(value), dest=name)
    given, rest = parser.parse_known_args(flags)
    without_defaults_of_others(process, vars(given))
    return rest


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 1 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} seconds, expected at least 1")
    return seconds
