"""``python -m fastdiff_bench.trainers.compiled_pass NETWORK MARK``: compile the blocks of a network as a run does.

One forward and one backward pass on the CPU. MARK, a JSON file, appears when the code is kept. The process then waits
for its end.
"""

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from fastdiff.config.networks.dit import dit_config
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.presets import SD2_UNET
from fastdiff.files import publish
from fastdiff.models.build import build_model
from fastdiff.models.compile_cache.cache import open_cache
from fastdiff.models.compile_cache.environment import describe
from fastdiff.models.compile_clock import compiled
from fastdiff.models.cost.dry_network import dry_inputs

NETWORKS: dict[str, ModelConfig] = {"dit-s-2": dit_config("DiT-S/2"), "sd2-unet": replace(SD2_UNET, size=32)}
"""The UNet on latents of 256 px, for the memory of a small machine; its blocks are those of any size."""


def main(argv: Sequence[str]) -> None:
    """Compile, keep the code, and tell."""
    name, mark = argv
    config, cpu = NETWORKS[name], torch.device("cpu")
    # Through JSON, as the record of a run: tuples are lists.
    facts = json.loads(json.dumps({**describe(cpu), "model": asdict(config)}))
    with open_cache(facts) as cache:
        model = build_model(config).compile_blocks()
        latents, condition = dry_inputs(config, model.inputs, 1)
        model(latents, torch.zeros(1, dtype=torch.int64), **condition).mean().backward()
        cache.keep()
        told = {"graphs": compiled.graphs, "anew": compiled.anew, "kernels": cache.kernels}
        publish(Path(mark), json.dumps(told).encode(), durable=False)
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
