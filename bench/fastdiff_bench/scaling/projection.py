"""Prediction of ``bench scale``: step time and efficiency on many GPUs, from a measured step.

The model is that of ``fastdiff plan --from``; here every GPU keeps the samples of the measured one (weak scaling).
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fastdiff.config import deepspeed as deepspeed_config
from fastdiff.config.run import RunConfig
from fastdiff.planning import gpus
from fastdiff.planning.calibration import Measured, calibrated, read
from fastdiff.planning.gpus import Gpus
from fastdiff.planning.network import read_network
from fastdiff.planning.options import work_of
from fastdiff.planning.scaling.communication import sent
from fastdiff.planning.step_time import StepTime, messages
from fastdiff_bench import BenchError
from fastdiff_bench.arguments import open_log
from fastdiff_bench.records.record import Fact, Measurement
from fastdiff_bench.records.tables import table

_COUNTS = tuple(2**power for power in range(11))
FLAGS = ("gpus", "gpu_file")
"""Flags of a prediction."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a prediction; the first disables the measurement."""
    flags = parser.add_argument_group("prediction from a measured step, instead of a measurement")
    flags.add_argument(
        "--from", dest="source", type=Path, metavar="RUN_OR_RECORD", help="finished run, or record of `bench step`"
    )
    flags.add_argument("--gpus", nargs="+", type=int, metavar="W", help="numbers of GPUs; default: 1 2 4 ... 1024")
    flags.add_argument(
        "--gpu-file", type=Path, metavar="FILE", help="as of `fastdiff plan`: other rates of links and of the GPU"
    )


def run(arguments: argparse.Namespace, provider: Callable[[str], str]) -> int:
    """Predict, print and record.

    Raises:
        BenchError: a flag has no effect, or the step was measured on a CPU or an unknown GPU.
        ConfigError: there is no measured step.
    """
    measured_alone = ["preset", "batch", "precision", "ranks", "device", "host"]
    refuse(arguments, measured_alone, "with --from, because nothing is measured")
    measured = read(arguments.source)
    known = gpus.known() if arguments.gpu_file is None else gpus.read(arguments.gpu_file)
    kind = gpus.of_device(measured.device, known)
    if kind is None:
        raise BenchError(
            f"--from {arguments.source}: measured on {measured.device}, which is no GPU of the table; expected a step "
            "of one of them, or --gpu-file with it"
        )
    sets = [gpus.parse(f"{count}x{kind.name}", known) for count in arguments.gpus or _COUNTS]
    predicted = list(_predicted(measured, sets, arguments.stages, Gpus(kind, 1, measured.ranks)))
    with open_log(arguments, "scale", "scale-prediction") as log:
        columns = ("ms", "low to high", "eff.", "limit", "GiB sent")
        rows = [["predicted", *(f"{provider(s)} {column}" for s in arguments.stages for column in columns)]]
        rows += [[f"{one.count} GPUs"] for one in sets]
        for stage, number, found, volume in predicted:
            rows[1 + number] += _cells(measured, found, volume)
            facts: dict[str, Fact] = {
                "device": measured.device, "gpus": sets[number].count, "GPUs per node": kind.per_node,
                "inside, GB/s": kind.link / 1e9, "between, GB/s per GPU": kind.network / 1e9, "sent GiB": volume,
                "limit": found.limit, "host, ms": 1e3 * found.host.middle,
            }  # fmt: skip
            log.write(*_measurements(measured, found, f"{provider(stage)}, {sets[number].count} GPUs", facts))
        print(f"{measured.source}: {1e3 * measured.seconds:.1f} ms per step of {measured.ranks} on {measured.device}")
        print(table(rows, "<" + ">" * (len(rows[0]) - 1)))
        print("Every GPU has as many samples as there. Stages whose ranges overlap: either may be faster.")
    return 0


def refuse(arguments: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Refuse flags that would have no effect.

    Raises:
        BenchError: one of them is given.
    """
    for name in names:
        if getattr(arguments, name) not in (None, False):
            raise BenchError(f"--{name.replace('_', '-')} has no effect {why}; leave it out")


def _predicted(
    measured: Measured, sets: Sequence[Gpus], stages: Sequence[str], there: Gpus
) -> Iterator[tuple[str, int, StepTime, float]]:
    """Yield stage, number of the set, step and the GiB that a GPU sends in it."""
    config = measured.config
    network = read_network(config, torch.device("cuda"))
    basis = calibrated(measured, work_of(config, measured.deepspeed, network, measured.ranks), there)
    for stage in stages:
        ds_config = deepspeed_config.read(stage)
        for number, here in enumerate(sets):
            work = work_of(_with_ranks(config, measured.ranks, here.count), ds_config, network, here.count)
            volume = sum(sent(message.kind, message.bytes, here.count) for message in messages(work, here)) / 2**30
            yield stage, number, basis.step_time(work, here), volume


def _with_ranks(config: RunConfig, before: int, after: int) -> RunConfig:
    """Return a run with the same samples on each of another number of ranks."""
    samples = config.batch.samples // before * after
    return replace(config, samples=samples, batch=replace(config.batch, samples=samples))


def _cells(measured: Measured, found: StepTime, volume: float) -> list[str]:
    step = found.whole
    spread = f"{1e3 * step.low:.2f} to {1e3 * step.high:.2f}"
    efficiency = f"{100 * measured.seconds / step.middle:.1f} %"
    return [f"{1e3 * step.middle:.2f}", spread, efficiency, found.limit, f"{volume:.3f}"]


def _measurements(measured: Measured, found: StepTime, provider: str, facts: dict[str, Fact]) -> Iterator[Measurement]:
    step, one = found.whole, measured.seconds
    for quantity, unit, value, low, high in (
        ("predicted step time", "ms", 1e3 * step.middle, 1e3 * step.low, 1e3 * step.high),
        ("predicted efficiency", "1", one / step.middle, one / step.high, one / step.low),
    ):
        spread = {**facts, "low": low, "high": high}
        yield Measurement.of("scale", measured.source, provider, quantity, unit, value, "neither", facts=spread)
