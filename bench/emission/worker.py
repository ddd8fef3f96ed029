"""Emission in a process of its own: ``python -m bench.emission.worker`` writes the blocks of a preset as JSON.

Faking a GPU changes torch for the whole process, so nothing else may run in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter

from bench import BenchError
from bench.emission.blocks import Emission
from bench.records.fingerprint import ROOT
from fastdiff.config.presets import preset
from fastdiff.errors import ConfigError

_EMISSION = TypeAdapter(Emission)
_LIMIT_S = 1800
"""Several times what the largest preset takes."""


def emitted(name: str, batch: int, arch: int, depth: int | None = None) -> Emission:
    """Let Inductor write the code of a preset's blocks in another process, and return the counts.

    Args:
        name: of the preset.
        batch: samples per micro-batch.
        arch: compute capability of the GPU: 90 is sm_90.
        depth: number of blocks of a transformer; None: the preset's.

    Raises:
        BenchError: there is no such preset, it has no depth, the process does not end, or it failed; then the message
            has the last line of its error.
    """
    _check(name, depth)
    # Triton's interpreter and a GPU that is present would both change what Inductor sees.
    environment = os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "blocks.json"
        words = [name, str(batch), str(arch), str(depth or 0), str(file)]
        command = [sys.executable, "-m", "bench.emission.worker", *words]
        try:
            done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise BenchError(f"emission of {name} did not end in {_LIMIT_S} s; run `{' '.join(command[1:])}`") from None
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise BenchError(f"emission of {name} failed: {reason}; run `{' '.join(command[1:])}` to see all")
        return _EMISSION.validate_json(file.read_bytes())


def _check(name: str, depth: int | None) -> None:
    try:
        config = preset(name).model
    except ConfigError as error:
        raise BenchError(str(error)) from None
    if depth and not hasattr(config, "depth"):
        raise BenchError(f"--depth {depth}: the network of {name} has levels instead of a depth; leave the flag out")


def main(name: str, batch: str, arch: str, depth: str, file: str) -> None:
    """Write the blocks of a preset to a file; see ``emitted``."""
    from bench.emission import fake_gpu

    fake_gpu.install(int(arch))
    from bench.emission.network import emit

    config = preset(name).model
    if int(depth):
        config = replace(config, depth=int(depth))  # type: ignore[call-arg]
    Path(file).write_bytes(_EMISSION.dump_json(emit(config, int(batch), int(arch))))


if __name__ == "__main__":
    main(*sys.argv[1:])
