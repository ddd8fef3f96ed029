"""Operations and messages of a step with Muon: what the plan counts is what a step does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fastdiff.config.command_line.config_file import with_optimizer
from fastdiff.config.deepspeed import resolve
from fastdiff.config.optimizers.registry import optimizer_family
from fastdiff.config.presets import preset
from fastdiff.config.run import RunConfig
from fastdiff.models.cost.dry_network import dry_inputs
from fastdiff.models.cost.flops import update_flops
from fastdiff.models.fused import Matrix
from fastdiff.parallel.world import World
from fastdiff.planning import gpus
from fastdiff.planning.network import read_network
from fastdiff.planning.options import OF_STAGE, work_of
from fastdiff.planning.rates import MIDDLE
from fastdiff.planning.step_time import Work, messages, update_seconds
from fastdiff.training.network import build_engine
from fastdiff.training.optimizer.orthogonalise import orthogonalise
from tests.support.processes import run_ranks
from tests.support.runs import launch, tiny

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "matrix", [Matrix((8, 8, 8), 1, 8), Matrix((4, 4, 4), 2, 8), Matrix((4, 8, 8), 1, 6), Matrix((6,), 1, 30)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operations_of_a_matrix_are_those_that_torch_counts(matrix: Matrix, dtype: torch.dtype) -> None:
    rows = matrix.groups * sum(matrix.heights)
    with FlopCounterMode(display=False) as counted:
        orthogonalise(torch.randn(rows, matrix.columns), matrix, dtype)
    found = update_flops(optimizer_family("muon"), {"weight": matrix})
    assert found == {"weight": counted.get_total_flops()}


def test_dit_xl_takes_20_tflop_and_adamw_none() -> None:
    """By hand: a block has 10 square matrices of 30 d^3, and two of 4 d by d with 90 d^3; one more is square."""
    network = read_network(with_muon(preset("dit-xl-2-256")), torch.device("cuda"))
    assert sum(network.update_flops) == (28 * (10 * 30 + 2 * 90) + 30) * 1152**3
    share = network.in_matrices / network.trained
    assert share > 0.99
    family = optimizer_family("muon")
    assert family.state_bytes(share) == pytest.approx(4 * share + 8 * (1 - share))
    assert optimizer_family("muon-bf16").state_bytes(share) == pytest.approx(2 * share + 8 * (1 - share))
    assert optimizer_family("adamw").state_bytes(share) == 8
    assert sum(read_network(preset("digits"), CPU).update_flops) == 0


def with_muon(config: RunConfig) -> RunConfig:
    return with_optimizer(config, "muon", "this test")


ENGINES = [("flat", 0), ("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3)]


def sent_by(world: World, digits: Path, folder: Path, dtype: str) -> list[tuple[int, int, int]]:
    """Take two steps under each engine; return the stage, the bytes that this rank sent, and the plan's of all."""
    found = []
    for engine, stage in ENGINES:
        config = with_muon(tiny(digits, folder, performance__engine=engine))
        optim: Any = replace(config.optim, iterations_dtype=dtype)
        config = replace(config, batch=replace(config.batch, samples=12), optim=optim)
        settings = resolve(launch(stage).deepspeed, config, world.size)
        model, trained = build_engine(config, settings, world, None)
        noisy, condition = dry_inputs(config.model, model.inputs, 12 // world.size)
        for _ in range(2):
            time = torch.full((len(noisy),), 0.5)
            trained.backward(trained(noisy + 1, time, **condition).square().mean())
            assert trained.step()
        work = work_of(config, settings, read_network(config, CPU), world.size)
        assert work.whole is not None
        _, planned = work.whole.spread(work.parameters, work.zero.slices(work.parameters, world.size))
        optimizer: Any = trained.optimizer
        found.append((stage, optimizer.sent_bytes, planned))
    return found


@pytest.mark.parametrize(("ranks", "dtype"), [(1, "bf16"), (2, "bf16"), (3, "fp32")])
def test_the_bytes_of_a_step_are_those_that_the_ranks_send(
    digits: Path, tmp_path: Path, ranks: int, dtype: str
) -> None:
    of_ranks = run_ranks(sent_by, digits, tmp_path, dtype, ranks=ranks)
    for parts in zip(*of_ranks, strict=True):
        stage, _, planned = parts[0]
        assert sum(sent for _, sent, _ in parts) == 2 * planned, f"ZeRO-{stage}"
        assert (planned > 0) == (ranks > 1)


def works(stage: int, number: int) -> tuple[Work, Work]:
    """Return the work with AdamW and with Muon."""
    config = preset("dit-xl-2-256")
    return tuple(  # type: ignore[return-value]
        work_of(one, OF_STAGE[stage], read_network(one, torch.device("cuda")), number)
        for one in (config, with_muon(config))
    )


def test_the_plan_has_the_time_of_both() -> None:
    on = gpus.parse("8xH100", gpus.known())
    without, found = works(0, 8)
    assert found.whole is not None
    largest, sent = found.whole.spread(found.parameters, found.zero.slices(found.parameters, 8))
    total = sum(found.whole.flops)
    assert total / 8 <= largest < 1.1 * total / 8, "owners share the work"
    products = largest / (MIDDLE.matmul * 989.4e12)
    smaller = replace(found, whole=None)
    assert update_seconds(found, on, MIDDLE) - update_seconds(smaller, on, MIDDLE) == pytest.approx(products)
    assert messages(found, on)[:-1] == messages(without, on)
    (last,) = messages(found, on)[-1:]
    elements = sum(size for size, flops in zip(found.parameters, found.whole.flops, strict=True) if flops)
    assert (last.kind, last.part, last.bytes) == ("all-to-all", "step", 2 * elements)
    assert sent == 7 * 2 * elements, "each result is sent to seven others"
    alone = gpus.parse("H100", gpus.known())
    assert messages(found, alone) == []
    assert update_seconds(found, alone, MIDDLE) > update_seconds(smaller, alone, MIDDLE) + 7 * products
