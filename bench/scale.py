"""PLACEHOLDER to be written by its owner."""

from __future__ import annotations

import argparse

from bench.arguments import Commands


def add(commands: Commands) -> None:
    """Register the command."""
    commands.add_parser("scale").set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    raise NotImplementedError
