"""Published files of weights, which some commands read in place of a run, and the flags that describe their network."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdiff.config.networks.user_defined import add_network
from fastdiff.errors import require
from fastdiff.plugins.user_code import names_file

if TYPE_CHECKING:
    from fastdiff.config.run import RunConfig

_FLAG = re.compile(r"--[a-z]\w*\.\w")
"""Begin of a flag of a run's configuration, ``--group.field``."""
_OPTION = re.compile(r"-(?![\d.])")
"""Begin of any flag, in contrast to a negative number."""


def add_preset(parser: argparse.ArgumentParser) -> None:
    """Register ``--preset``, for commands on runs that also read published files (``split_fields``)."""
    parser.add_argument(
        "--preset",
        metavar="NAME",
        help="network and objective of a published file of weights (DiT, SiT, improved-diffusion, guided-diffusion), "
        "which takes the place of RUN; flags of the training, such as --model.classes 10, change it: give them after "
        "RUN and OUT",
    )


def add_plugin(parser: argparse.ArgumentParser) -> None:
    """Register ``--plugin``, for commands on runs whose network is code of the user."""
    parser.add_argument(
        "--plugin",
        action=_Plugin,
        metavar="PATH.py:NAME",
        help="network of the run, if it was trained with --model.kind PATH.py:NAME; this runs PATH.py. A run folder "
        "alone never names code that is executed",
    )


class _Plugin(argparse.Action):
    """Registers the network of a file for this process."""

    def __call__(self, parser: argparse.ArgumentParser, arguments: Any, values: Any, option: str | None = None) -> None:
        """Execute the file."""
        require(names_file(values), f"--plugin {values}: expected PATH.py:NAME")
        add_network(values, "--plugin")


def split_fields(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into its own arguments and the ``--group.field VALUE ...`` flags of a configuration."""
    parts: tuple[list[str], list[str]] = ([], [])
    of_fields = False
    for argument in argv:
        if _OPTION.match(argument):
            of_fields = _FLAG.match(argument) is not None
        parts[of_fields].append(argument)
    return parts


def parse_published(path: Path, name: str | None, flags: Sequence[str]) -> RunConfig | None:
    """Return the configuration of a published file of weights: a preset with flags, as a run that starts from it.

    Args:
        path: subject of a command, the file or a run folder.
        name: the preset; None: ``path`` is a run, which has its own configuration.
        flags: ``--group.field VALUE``, as in training.

    Returns:
        The configuration, where the file is also the folder that messages name; None for a run.

    Raises:
        ConfigError: a run with a preset or flags, a file without a preset, or a network that no file can hold.
        SystemExit: as ``train_flags.parse``.
    """
    from fastdiff.config.command_line.train_flags import parse
    from fastdiff.config.networks.pretrained import WEIGHT_FILES

    is_file = path.suffix in WEIGHT_FILES and not path.is_dir()
    if name is None:
        require(not flags, f"{' '.join(flags)}: only a published file of weights has such flags, with its --preset")
        require(not is_file, f"{path} is a file of weights: name its network by --preset, for example dit-xl-2-256")
        return None
    require(is_file, f"--preset {name} is for a file of weights ({' or '.join(WEIGHT_FILES)}); a run has its own")
    require(path.is_file(), f"{path}: no such file of weights")
    start = ["--pretrained.path", str(path), "--pretrained.weights", "--output.folder", str(path)]
    _, config = parse(["--preset", name, "--data.path", "", *flags, *start])
    require(not config.model.text_conditional, f"--preset {name}: published text-to-image networks are pipelines")
    require(not config.lora.rank, f"--lora.rank {config.lora.rank}: {path} has the weights of a network, no adapter")
    return config
