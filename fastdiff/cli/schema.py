"""``fastdiff schema``: the JSON schema of ``--config`` files, for editors."""

import argparse
import json

from fastdiff.config.arguments.types import Subcommands


def add(commands: Subcommands) -> None:
    """Register the command."""
    text = "print the JSON schema of --config files, for editors that complete and check them"
    parser = commands.add_parser("schema", help=text)
    parser.set_defaults(run=_schema)


def _schema(arguments: argparse.Namespace) -> None:
    from fastdiff.config.command_line.json_schema import config_schema

    print(json.dumps(config_schema(), indent=2))
