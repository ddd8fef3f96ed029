"""Emission in a process of its own: faking a GPU changes torch for the whole process, so nothing else may run in it."""

import sys
import traceback

from fastdiff_bench import BenchError
from fastdiff_bench.emission import fake_gpu
from fastdiff_bench.emission.blocks import Emission
from fastdiff_bench.emission.subject import Subject
from fastdiff_bench.measure.interleaved import in_another_process


def emitted(subject: Subject, batch: int, arch: int, *, instructions: bool = False) -> Emission:
    """Let Inductor write the code of a network's blocks in another process, and return the counts.

    Args:
        subject: the network.
        batch: samples per micro-batch.
        arch: compute capability of the GPU: 90 is sm_90.
        instructions: compile the kernels of the blocks, and count their instructions: a second each.

    Raises:
        BenchError: there is no such network, or the process failed; then its traceback is printed.
    """
    subject.config()
    # Triton's interpreter and a GPU that is present would both change what Inductor sees.
    environment = {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    try:
        found: Emission = in_another_process(_emit, subject, batch, arch, instructions, environment=environment)
    except Exception as error:
        traceback.print_exception(error, file=sys.stderr)
        reason = (str(error).strip().splitlines() or ["no message"])[-1]
        raise BenchError(f"emission of {subject.name} failed: {type(error).__name__}: {reason}") from None
    return found


def _emit(subject: Subject, batch: int, arch: int, instructions: bool) -> Emission:
    fake_gpu.install(arch)
    from fastdiff_bench.emission.network import emit

    return emit(subject.config(), batch, arch, performance=subject.performance, instructions=instructions)
