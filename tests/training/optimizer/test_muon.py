"""Muon: a step beside float64, the same trajectory under every engine and number of ranks, and exact resumes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdiff.config.command_line.config_file import with_optimizer
from fastdiff.config.networks.pretrained import LoraConfig, PretrainedConfig
from fastdiff.config.optimizers.muon import SCALES, MuonConfig
from fastdiff.config.optimizers.registry import family_of, optimizer_family
from fastdiff.config.run import RunConfig
from fastdiff.errors import ConfigError
from fastdiff.models.fused import Matrix
from fastdiff.parallel.fragments import Flat, Fragment
from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from fastdiff.training.optimizer.build import build_optimizer, create_state
from fastdiff.training.optimizer.orthogonalise import COEFFICIENTS
from tests.support.killed import assert_it_goes_on
from tests.support.nights import by_day
from tests.support.processes import run_ranks
from tests.support.runs import assert_same_checkpoint, copy_run, hexes, launch, losses, newest, tiny, train_losses

SHAPES = {
    "qkv": (24, 8),
    "heads": (24, 8),
    "uneven": (20, 6),
    "wide": (6, 30),
    "convolution": (8, 5, 3, 3),
    "embedding": (10, 8),
    "bias": (7,),
}
MATRICES = {
    "qkv": Matrix((8, 8, 8), 1, 8),
    "heads": Matrix((4, 4, 4), 2, 8),
    "uneven": Matrix((4, 8, 8), 1, 6),
    "wide": Matrix((6,), 1, 30),
    "convolution": Matrix((8,), 1, 45),
}
ROWS: Mapping[str, Sequence[Sequence[int]]] = {
    "qkv": [range(8), range(8, 16), range(16, 24)],
    "heads": [[*range(4 * i, 4 * i + 4), *range(12 + 4 * i, 16 + 4 * i)] for i in range(3)],
    "uneven": [range(4), range(4, 12), range(12, 20)],
    "wide": [range(6)],
    "convolution": [range(8)],
}
"""Rows of each matrix in a weight."""


def in_float64(
    weights: Mapping[str, Tensor], gradients: Sequence[Mapping[str, Tensor]], config: MuonConfig
) -> dict[str, Tensor]:
    """Return the weights after these gradients, matrix by matrix, by a decomposition into singular values.

    A polynomial of odd powers of X acts on the singular values of X alone (Jordan et al. 2024).
    """
    found = {name: value.double() for name, value in weights.items()}
    moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in found.items()}
    for number, given in enumerate(gradients, 1):
        for name, weight in found.items():
            gradient, (first, second) = given[name].double(), moments[name]
            if name not in ROWS:
                beta1, beta2 = config.adamw_betas
                first.copy_(beta1 * first + (1 - beta1) * gradient)
                second.copy_(beta2 * second + (1 - beta2) * gradient**2)
                corrected = (second / (1 - beta2**number)).sqrt() + config.adamw_eps
                weight *= 1 - config.adamw_lr * config.weight_decay
                weight -= config.adamw_lr * first / (1 - beta1**number) / corrected
                continue
            first.copy_(config.momentum * first + (1 - config.momentum) * gradient)
            mixed = config.momentum * first + (1 - config.momentum) * gradient if config.nesterov else first
            weight *= 1 - config.lr * config.weight_decay
            for rows in ROWS[name]:
                matrix = mixed.flatten(1)[list(rows)]
                left, values, right = torch.linalg.svd(matrix / (matrix.norm() + 1e-7), full_matrices=False)
                for _ in range(5):
                    values = sum(c * values ** (2 * power + 1) for power, c in enumerate(COEFFICIENTS))
                update = SCALES[config.scale](*matrix.shape) * (left * values) @ right
                weight.view(len(weight), -1)[list(rows)] -= config.lr * update
    return found


def stepped(
    weights: Mapping[str, Tensor], gradients: Sequence[Mapping[str, Tensor]], config: MuonConfig, factor: float = 1.0
) -> dict[str, Tensor]:
    """Return the weights after the steps of the optimizer, at the rate times a factor, in one flat tensor."""
    flat = torch.cat([value.flatten() for value in weights.values()])
    optimizer, fragments, offset = build_optimizer([flat], config, skip_non_finite=False), [], 0
    for name, shape in SHAPES.items():
        fragments.append(Fragment(name, 0, math.prod(shape), offset))
        offset += math.prod(shape)
    world = World(rank=0, size=1, device=torch.device("cpu"))
    flats = [Flat(flat, optimizer.state, tuple(fragments), owned=True)]
    create_state(optimizer, family_of(config), flats, SHAPES, MATRICES, world)
    for given in gradients:
        flat.grad = torch.cat([value.flatten() for value in given.values()])
        optimizer.param_groups[0]["lr"] = factor * config.lr
        optimizer.step()
    return {one.name: one.of(flat).view(SHAPES[one.name]) for one in fragments}


def drawn(seed: int) -> dict[str, Tensor]:
    """Values of every parameter; queries, keys and values are of other sizes."""
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    found["qkv"] *= torch.tensor([10.0, 1.0, 0.1]).repeat_interleave(8)[:, None]
    return found


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-6), ("bf16", 0.04)])
@pytest.mark.parametrize("options", [{}, {"nesterov": False, "weight_decay": 0.5}], ids=["nesterov", "plain"])
def test_its_steps_are_those_of_float64(scale: Any, dtype: Any, bound: float, options: dict[str, Any]) -> None:
    """The bound is of the whole movement in three steps, relative to it."""
    config = MuonConfig(scale=scale, iterations_dtype=dtype, **options)
    weights, gradients = drawn(0), [drawn(seed) for seed in (1, 2, 3)]
    found, expected = stepped(weights, gradients, config), in_float64(weights, gradients, config)
    for name, value in expected.items():
        moved = (value - weights[name].double()).norm()
        # Each step rounds a weight to fp32, whatever its size.
        bounds = (bound if name in ROWS else 1e-6) * moved + 2e-7 * weights[name].norm()
        assert (found[name].double() - value).norm() <= bounds, name


def test_parts_of_a_fused_weight_move_alike() -> None:
    """Gradients of queries, keys and values in the proportion 10 : 1 : 0.1 move them by steps of one size."""
    weights = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    found = stepped(weights, [drawn(1)], MuonConfig(lr=1.0, iterations_dtype="fp32"))["qkv"]
    sizes = [part.square().mean().sqrt().item() for part in found.chunk(3)]
    assert max(sizes) < 1.5 * min(sizes)


@pytest.mark.parametrize(
    ("scale", "tall", "wide"),
    [
        ("keller", 2.0, 1.0),
        ("match_rms_adamw", 0.2 * math.sqrt(1024), 0.2 * math.sqrt(1024)),
        ("dion", 2.0, 0.5),
        ("spectral", 32.0, 32.0),
    ],
)
def test_the_published_scales(scale: str, tall: float, wide: float) -> None:
    assert SCALES[scale](1024, 256) == pytest.approx(tall)
    assert SCALES[scale](256, 1024) == pytest.approx(wide)


ENGINES = [("flat", 0), ("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3)]
Losses = dict[str, list[float]]


def run_of(digits: Path, folder: Path, engine: str, steps: int, **options: Any) -> RunConfig:
    """A run with batches that 1, 2, 3 and 4 ranks divide."""
    config = with_optimizer(tiny(digits, folder, performance__engine=engine), "muon", "this test")
    optim = replace(config.optim, **{"iterations_dtype": "fp32", "weight_decay": 0.01, **options})
    return replace(config, batch=replace(config.batch, samples=12), samples=12 * steps, optim=optim)


def trained(world: World, digits: Path, folder: Path, steps: int, options: dict[str, Any]) -> Losses:
    """Losses under every engine and stage."""
    return {
        f"{engine}-{stage}": train_losses(
            world, run_of(digits, folder / f"{engine}-{stage}", engine, steps, **options), launch(stage)
        )
        for engine, stage in ENGINES
    }


@pytest.mark.parametrize(("ranks", "steps"), by_day([((1, 2, 3), 6)], ((1, 2, 3, 4), 50)))
def test_the_trajectory_is_one_for_every_engine_stage_and_number_of_ranks(
    digits: Path, tmp_path: Path, ranks: Sequence[int], steps: int
) -> None:
    found = {n: run_ranks(trained, digits, tmp_path / str(n), steps, {}, ranks=n)[0] for n in ranks}
    expected = found[1]["flat-0"]
    assert expected[-1] < expected[0]
    for number, series in found.items():
        for name, own in series.items():
            assert own == pytest.approx(expected, rel=1e-6), f"{number} ranks, {name}"
            assert number > 1 or hexes(own) == hexes(expected), name


def test_equal_gradients_make_equal_bits_however_the_matrices_are_spread(digits: Path, tmp_path: Path) -> None:
    """Two gradients have one sum in any order; ZeRO-3 divides before, and without clipping no norm matters."""
    found = run_ranks(trained, digits, tmp_path, 6, {"clip": 0.0}, ranks=2)[0]
    assert {tuple(hexes(own)) for name, own in found.items() if name != "deepspeed-3"} == {
        tuple(hexes(found["flat-0"]))
    }


def in_two_parts(world: World, digits: Path, folder: Path, cases: Sequence[tuple[str, int, str]]) -> None:
    """Train six steps by name of the optimizer under each engine and stage, at once and in two parts."""
    for engine, stage, name in cases:
        own = folder / f"{engine}-{stage}-{name}"
        for part, steps in (("whole", 6), ("parts", 3), ("parts", 6)):
            config = run_of(digits, own / part, engine, steps, iterations_dtype="bf16")
            train(replace(config, optim=replace(config.optim, name=name)), launch(stage), world)


CASES = [
    ("flat", 0, "muon-bf16"),
    ("deepspeed", 1, "muon"),
    ("deepspeed", 2, "muon8bit"),
    ("deepspeed", 3, "muon-bf16"),
]
MOMENTA = {
    "muon": ("momentum", torch.float32),
    "muon-bf16": ("momentum", torch.bfloat16),
    "muon8bit": ("momentum_codes", torch.int8),
}
"""Name and dtype of the momentum in checkpoints."""


def test_a_resume_keeps_every_bit(digits: Path, tmp_path: Path) -> None:
    run_ranks(in_two_parts, digits, tmp_path, CASES, ranks=2)
    for engine, stage, name in CASES:
        own = tmp_path / f"{engine}-{stage}-{name}"
        assert hexes(losses(own / "parts")) == hexes(losses(own / "whole"))
        assert_same_checkpoint(own / "whole", own / "parts")
        saved, qkv = newest(own / "whole"), "blocks.0.attn.qkv.weight"
        key, dtype = MOMENTA[name]
        assert saved.manifest["sliced_state"] == sorted(tensor.name for tensor in optimizer_family(name).state)
        momentum = saved.slice(key, Fragment(qkv, 0, 32 * 96, 0))
        assert momentum.dtype == dtype
        of_matrices, others = (
            {key.partition("/")[2] for _, key in saved.keys(f"{one}/")}
            for one in (key, "exp_avg_codes" if name == "muon8bit" else "exp_avg")
        )
        assert qkv in of_matrices
        assert not of_matrices & others, "a parameter has the state of one of the two"


def go_on(world: World, digits: Path, start: Path, folder: Path) -> Losses:
    """Go on from a run of three steps under every engine and stage; return the losses of all six."""
    found = {}
    for engine, stage in ENGINES:
        own = folder / f"{engine}-{stage}"
        copy_run(world, start, own)
        found[f"{engine}-{stage}"] = train_losses(world, run_of(digits, own, engine, 6), launch(stage))
    return found


def test_any_engine_stage_and_number_of_ranks_goes_on(digits: Path, tmp_path: Path) -> None:
    start, whole = tmp_path / "start", tmp_path / "whole"
    run_ranks(train_losses, run_of(digits, start, "deepspeed", 3), launch(3), ranks=2)
    expected = run_ranks(train_losses, run_of(digits, whole, "flat", 6), launch(0), ranks=1)[0]
    for ranks in (1, 3):
        found = run_ranks(go_on, digits, start, tmp_path / str(ranks), ranks=ranks)[0]
        for name, own in found.items():
            assert own == pytest.approx(expected, rel=1e-6), f"{ranks} ranks, {name}"


def test_a_killed_run_goes_on_bitwise(digits: Path, tmp_path: Path) -> None:
    assert_it_goes_on(digits, tmp_path, "muon")


def test_adamw_has_a_rate_of_its_own_that_follows_the_schedule() -> None:
    zeros, gradients = {name: torch.zeros(shape) for name, shape in SHAPES.items()}, [drawn(1)]
    whole = stepped(zeros, gradients, MuonConfig(iterations_dtype="fp32"))
    assert whole["bias"].abs().mean().item() == pytest.approx(3e-4)
    half = stepped(zeros, gradients, MuonConfig(iterations_dtype="fp32"), factor=0.5)
    for name in SHAPES:
        torch.testing.assert_close(half[name], 0.5 * whole[name])
    other = stepped(zeros, gradients, MuonConfig(iterations_dtype="fp32", adamw_lr=6e-4))
    torch.testing.assert_close(other["bias"], 2 * whole["bias"])
    assert torch.equal(other["qkv"], whole["qkv"])


def of_seed(digits: Path, folder: Path, name: str, seed: int) -> RunConfig:
    config = run_of(digits, folder / f"{name}-{seed}", "flat", 200, iterations_dtype="bf16")
    return replace(config, seed=seed, optim=replace(config.optim, name=name))


@pytest.mark.nightly
def test_a_rounded_momentum_costs_less_than_half_a_per_cent_of_the_loss(
    world: World, digits: Path, tmp_path: Path
) -> None:
    """Over three seeds, whose losses differ by a per cent either way: the last 50 of 200 steps, of the same samples."""
    losses_of = {
        name: sum(sum(train_losses(world, of_seed(digits, tmp_path, name, seed), launch(0))[-50:]) for seed in range(3))
        for name in ("muon", "muon-bf16", "muon8bit")
    }
    more = {name: found / losses_of["muon"] - 1 for name, found in losses_of.items()}
    assert max(more.values()) < 5e-3, more


def test_a_momentum_of_8_bits_moves_weights_as_an_exact_one() -> None:
    """The first step rounds nothing. A block with queries a hundred times as large as values loses most of these."""
    weights, gradients = drawn(0), [drawn(seed) for seed in (1, 2, 3)]
    for steps, bounds in ((1, {}), (3, dict.fromkeys(SHAPES, 0.02) | {"qkv": 0.2})):
        exact, rounded = (
            stepped(weights, gradients[:steps], MuonConfig(name=name, iterations_dtype="fp32"))
            for name in ("muon", "muon8bit")
        )
        for name, value in exact.items():
            moved = (value - weights[name]).norm()
            lost = (rounded[name] - value).norm()
            assert lost <= bounds.get(name, 1e-6) * moved + 2e-7 * weights[name].norm(), (steps, name)
            assert steps == 1 or lost > 1e-4 * moved, "it is rounded"


def test_a_resume_from_adamw_is_refused_with_the_ways(world: World, digits: Path, tmp_path: Path) -> None:
    config = run_of(digits, tmp_path, "flat", 3)
    train(replace(config, optim=with_optimizer(config, "adamw", "this test").optim), launch(0), world)
    longer = run_of(digits, tmp_path, "flat", 6)
    with pytest.raises(ConfigError, match=r'(?s)optim.name: "adamw" -> "muon".*export .*--pretrained.*name.*zero'):
        train(longer, launch(0), world)
    own = ("optim.lr", "optim.name", "optim.weight_decay")
    train(longer, launch(0, allow_change=own), world)
    assert newest(tmp_path).optimizer_steps == 3, "it starts without state"


def spread(world: World, *, cut: bool, config: MuonConfig, steps: int = 1) -> tuple[Tensor, int]:
    """Take steps of all weights, which every rank has whole or a part of; return own weights and the bytes sent."""
    values, *gradients = (torch.cat([one.flatten() for one in drawn(seed).values()]) for seed in range(1 + steps))
    first, last = 0, len(values)
    if cut:
        first, last = (len(values) * one // world.size for one in (world.rank, world.rank + 1))
    fragments, offset = [], 0
    for name, shape in SHAPES.items():
        end = offset + math.prod(shape)
        start, stop = max(offset, first), min(end, last)
        if start < stop:
            fragments.append(Fragment(name, start - offset, stop - start, start - first))
        offset = end
    own = values[first:last].clone()
    optimizer: Any = build_optimizer([own], config, skip_non_finite=False)
    flats = [Flat(own, optimizer.state, tuple(fragments), owned=True)]
    create_state(optimizer, family_of(config), flats, SHAPES, MATRICES, world)
    for gradient in gradients:
        own.grad = gradient[first:last].clone()
        optimizer.step()
    return own, optimizer.sent_bytes


def test_owners_share_the_work_and_bytes_are_counted() -> None:
    """In bf16 a result has two bytes; of whole weights nothing is gathered, of cut ones only what another rank has."""
    expected = torch.cat([one.flatten() for one in stepped(drawn(0), [drawn(1)], MuonConfig()).values()])
    matrices = sum(math.prod(SHAPES[name]) for name in MATRICES)
    for ranks in (2, 3):
        whole = run_ranks(partial(spread, cut=False, config=MuonConfig()), ranks=ranks)
        assert all(torch.equal(own, expected) for own, _ in whole)
        assert sum(sent for _, sent in whole) == 2 * matrices * (ranks - 1)
        assert all(sent > 0 for _, sent in whole)
        parts = run_ranks(partial(spread, cut=True, config=MuonConfig()), ranks=ranks)
        assert torch.equal(torch.cat([own for own, _ in parts]), expected)
        sent = sum(sent for _, sent in parts)
        assert 0 < sent < 2 * 2 * matrices
        assert sent == 2 * 2 * _of_others(ranks)


def _of_others(ranks: int) -> int:
    """Elements of matrices that lie on another rank than the owner: the one with a slice and the least work so far."""
    borders = [sum(map(math.prod, SHAPES.values())) * rank // ranks for rank in range(ranks + 1)]
    found, offset, load = 0, 0, [0] * ranks
    for name, shape in SHAPES.items():
        start, offset = offset, offset + math.prod(shape)
        held = [max(0, min(offset, borders[r + 1]) - max(start, borders[r])) for r in range(ranks)]
        if name in MATRICES:
            owner = min((r for r in range(ranks) if held[r]), key=lambda r: (load[r], r))
            height, columns = MATRICES[name].heights, MATRICES[name].columns
            for rows in (MATRICES[name].groups * h for h in height):
                load[owner] += 2 * min(rows, columns) ** 2 * max(rows, columns) + min(rows, columns) ** 3
            found += math.prod(shape) - held[owner]
    return found


def test_an_adapter_is_refused() -> None:
    pretrained = PretrainedConfig(path="model.safetensors", weights=True)
    with pytest.raises(ConfigError, match=r"--optim.name muon is for networks that are trained whole, and --lora.rank"):
        RunConfig(optim=MuonConfig(), pretrained=pretrained, lora=LoraConfig(rank=2))


@pytest.mark.parametrize(
    ("field", "value"),
    [("momentum", 1.0), ("adamw_lr", 0.0), ("adamw_betas", (0.9, 1.0)), ("adamw_eps", 0.0)],
)
def test_wrong_hyper_parameters_are_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"--optim.{field} "):
        MuonConfig(**{field: value})


def test_blocks_of_8_bits_that_ranks_share_have_one_scale() -> None:
    """Every cut lies within a block of 256 elements; the weights after three steps have the same bits."""
    config = MuonConfig(name="muon8bit")
    expected = torch.cat(
        [one.flatten() for one in stepped(drawn(0), [drawn(seed) for seed in (1, 2, 3)], config).values()]
    )
    for ranks in (2, 3):
        parts = run_ranks(partial(spread, cut=True, config=config, steps=3), ranks=ranks)
        assert torch.equal(torch.cat([own for own, _ in parts]), expected)
