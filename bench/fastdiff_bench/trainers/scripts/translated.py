"""fastdiff with the flags that ``fastdiff compat`` prints for a script's command line."""

from collections.abc import Sequence
from contextlib import ExitStack, chdir
from itertools import takewhile
from pathlib import Path

from fastdiff.cli.compat.run import train_flags, translate
from fastdiff.cli.compat.translation import LAUNCH
from fastdiff.cli.main import main
from fastdiff.config.command_line.train_flags import parse
from fastdiff.config.run import RunConfig
from fastdiff.console import quieten
from fastdiff.parallel.world import start_world
from fastdiff.training.build import build
from fastdiff.training.loop import take_steps
from fastdiff_bench.measure.session import StepTimer
from fastdiff_bench.trainers.ours import AfterStep, Observed


def prepare(script: str, flags: Sequence[str], folder: Path) -> None:
    """Run the commands before the training; arguments as for ``run``."""
    with chdir(folder):
        commands = translate(script, flags, gpus=1).commands
    for command in takewhile(lambda words: words[: len(LAUNCH)] != LAUNCH, commands):
        if (code := main(command[1:])) != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {code}")


def run(timer: StepTimer, script: str, flags: Sequence[str], folder: Path) -> None:
    """Step until ``Enough``; see ``fastdiff_bench.trainers.ours``."""
    quieten()
    with chdir(folder):
        own = train_flags(script, flags)
    launch, config = parse([*own, "--output.folder", str(folder / f"run-{script}")])
    world = start_world()
    with ExitStack() as stack:
        built = build(config, launch, world, stack)
        timer.ready()
        take_steps(built.state, built.batches, Observed(built.callbacks, AfterStep(timer)))


def config(script: str, flags: Sequence[str]) -> RunConfig:
    """Return the configuration of the run, without its folder; arguments as for ``run``."""
    return parse(train_flags(script, flags))[1]
