"""State of bitsandbytes' AdamW8bit under DeepSpeed."""

from collections.abc import Sequence
from typing import Any

from fastdiff.parallel.fragments import Flat
from fastdiff.parallel.world import World


def create_state(optimizer: Any, flats: Sequence[Flat], world: World) -> None:
    """Create the moments, which bitsandbytes keeps in 8 bits from 4096 elements on."""
    options = optimizer.param_groups[0]
    parameters = options["params"]
    for flat in flats:
        options["params"] = [flat.key]  # bitsandbytes looks it up there; ZeRO-3 has it only during a step
        optimizer.init_state(options, flat.key, 0, 0)
    options["params"] = parameters
