"""Emission in a process of its own: ``python -m fastdiff_bench.emission.worker`` writes the blocks as JSON.

Faking a GPU changes torch for the whole process, so nothing else may run in it.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from pydantic import TypeAdapter

import fastdiff
import fastdiff_bench
import fastdiff_kernels
from fastdiff_bench import BenchError
from fastdiff_bench.emission.blocks import Emission
from fastdiff_bench.emission.subject import Subject

_EMISSION, _SUBJECT = TypeAdapter(Emission), TypeAdapter(Subject)
_LIMIT_S = 1800
"""Several times what the largest preset takes."""


def emitted(subject: Subject, batch: int, arch: int) -> Emission:
    """Let Inductor write the code of a network's blocks in another process, and return the counts.

    Args:
        subject: the network.
        batch: samples per micro-batch.
        arch: compute capability of the GPU: 90 is sm_90.

    Raises:
        BenchError: there is no such network, the process does not end, or it failed; then the message has the last
            line of its error.
    """
    subject.config()
    # Triton's interpreter and a GPU that is present would both change what Inductor sees.
    environment = os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    packages = (fastdiff, fastdiff_kernels, fastdiff_bench)
    environment["PYTHONPATH"] = os.pathsep.join(str(Path(str(one.__file__)).parents[1]) for one in packages)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "blocks.json"
        words = [_SUBJECT.dump_json(subject).decode(), str(batch), str(arch), str(file)]
        command = [sys.executable, "-m", "fastdiff_bench.emission.worker", *words]
        shown = shlex.join(command[1:])
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise BenchError(f"emission of {subject.name} did not end in {_LIMIT_S} s; run `{shown}`") from None
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise BenchError(f"emission of {subject.name} failed: {reason}; run `{shown}` to see all")
        return _EMISSION.validate_json(file.read_bytes())


def main(subject: str, batch: str, arch: str, file: str) -> None:
    """Write the blocks of a network, given as JSON, to a file; see ``emitted``."""
    from fastdiff_bench.emission import fake_gpu

    fake_gpu.install(int(arch))
    from fastdiff_bench.emission.network import emit

    network = _SUBJECT.validate_json(subject)
    found = emit(network.config(), int(batch), int(arch), fp8=network.fp8)
    Path(file).write_bytes(_EMISSION.dump_json(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
