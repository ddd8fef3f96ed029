"""The run that every test of this folder makes."""

from pathlib import Path

from tests.support.processes import ON_CPU
from tests.support.runs import flags, tiny

STEPS = 150


def command_line(data: Path, folder: Path) -> list[str]:
    """Return the flags of the trainer: a tiny DiT on the digits under ZeRO-3, a checkpoint every ten steps."""
    config = tiny(data, folder, steps=STEPS, output__checkpoint_every=10)
    return [*flags(config), "--deepspeed_config", "deepspeed_configs/zero3.json", *ON_CPU]
