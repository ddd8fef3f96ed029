"""Published trainings: the plan is within 30 % of what their authors report, with one set of assumed efficiencies.

They are eager PyTorch without fastdiff's kernels, so they are planned with ``--performance.compile False`` and
``--performance.kernels reference``. Each states its own micro-batch or leaves it to the plan.
"""

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from fastdiff.config.command_line.train_flags import parse
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.planning import gpus
from fastdiff.planning.calibration import ASSUMED
from fastdiff.planning.network import Network, read_network
from fastdiff.planning.options import Planned, json_of, options, work_of
from fastdiff_bench.records import record

RECOMPUTED = ("--performance.recompute", "--performance.stored_blocks", "0")
"""In every block."""
EAGER = ("--performance.compile", "False", "--performance.kernels", "reference")


@dataclass(frozen=True)
class Published:
    name: str
    source: str
    gpus: str
    flags: tuple[str, ...]
    images_per_s: float
    nightly: bool = False
    """Whether another one by day is of the same network, in another precision or size, which takes seconds to read."""


CASES = (
    Published(
        "DiT-XL/2 at 256 px on four RTX 3090: 7 M steps of 256 in 81 days",
        "a report on the published training code of DiT",
        "4x3090",
        ("--preset", "dit-xl-2-256", "--samples", str(7_000_000 * 256)),
        7_000_000 * 256 / (81 * 86400),
    ),
    Published(
        "DiT-XL/2 at 256 px on one A100, recomputed, mixed precision, encoded before: 0.84 steps of 128 per second",
        "https://github.com/chuanyangjin/fast-DiT#improved-training-performance",
        "A100",
        ("--preset", "dit-xl-2-256", *RECOMPUTED, "--batch.samples", "128"),
        0.84 * 128,
    ),
    Published(
        "DiT-XL/2 at 256 px on eight A100 in fp32, images encoded under way: 0.51 steps of 256 per second",
        "https://github.com/facebookresearch/DiT/issues/22",
        "8xA100",
        ("--preset", "dit-xl-2-256", "--performance.precision", "fp32"),
        0.51 * 256,
        nightly=True,
    ),
    Published(
        "Stable Diffusion 2 at 512 px on eight A100, encoded before: 290 images per second",
        "https://github.com/mosaicml/diffusion#how-many-gpus-do-i-need",
        "8xA100",
        ("--preset", "sd2-512"),
        290,
    ),
    Published(
        "Stable Diffusion 2 at 512 px on 128 A100, encoded before: 4,590 images per second",
        "https://github.com/mosaicml/diffusion#how-many-gpus-do-i-need",
        "128xA100",
        ("--preset", "sd2-512"),
        4590,
    ),
    Published(
        "Stable Diffusion 2 at 256 px on eight A100, encoded before: 1,100 images per second",
        "https://github.com/mosaicml/diffusion#how-many-gpus-do-i-need",
        "8xA100",
        ("--preset", "sd2-512", "--model.size", "32"),
        1100,
        nightly=True,
    ),
)


@cache
def network_of(model: ModelConfig, performance: PerformanceConfig) -> Network:
    """Read a network once for all trainings of it, with and without recomputation: it takes seconds."""
    return read_network(RunConfig(model=model, performance=performance), torch.device("cuda"), varies=True)


def fastest(case: Published) -> Planned:
    launch, config = parse([*case.flags, *EAGER])
    network = network_of(config.model, replace(config.performance, recompute=False))
    fitting, refused = options(config, launch, network, gpus.parse(case.gpus, gpus.known()), ASSUMED)
    assert fitting, refused
    return fitting[0]


@pytest.mark.parametrize(
    "case", [pytest.param(each, id=each.name, marks=pytest.mark.nightly if each.nightly else ()) for each in CASES]
)
def test_a_published_training_is_predicted(case: Published) -> None:
    found = fastest(case).images_per_s
    assert found.low < found.middle < found.high
    seconds, reported = 1 / found.middle, 1 / case.images_per_s
    assert abs(seconds / reported - 1) <= 0.3


def test_the_step_measured_on_an_h200_is_predicted() -> None:
    """Its rates are those of the table, so that this holds their bookkeeping; ``--from`` predicts it exactly."""
    rows = record.read(record.PUBLISHED / "nvidia-h200" / "2026-11-26_gpu" / "step.jsonl").measurements
    measured = next(1e-3 * row.value for row in rows if row.quantity == "step time")
    flags = ("--preset", "dit-xl-2-256", "--batch.samples", "256", "--batch.micro", "256")
    launch, config = parse([*flags, "--deepspeed_config", "zero1"])
    network = read_network(config, torch.device("cuda"))
    work = work_of(config, json_of(1, launch), network, 1)
    assert ASSUMED.step_time(work, gpus.parse("H200", gpus.known())).whole.middle == pytest.approx(measured, rel=0.02)
