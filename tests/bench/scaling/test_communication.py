"""The model of the communication: formulas by hand, and limits."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from fastdiff.errors import ConfigError
from fastdiff.planning.scaling.communication import Cluster, Compute, Link, Message, sent, step_seconds
from fastdiff.planning.scaling.zero import Zero, parameters_of
from fastdiff_bench.measure.workload import Workload

CLUSTER = Cluster(8, Link(3e-6, 400e9), Link(10e-6, 40e9))
STAGES = ("ddp", "zero1", "zero2", "zero3")


def zero(stage: str) -> Zero:
    return Zero.of(Workload(preset="digits", deepspeed=stage).deepspeed_json())


def volume(setting: Zero, parameters: Sequence[int], ranks: int, width: int = 2) -> float:
    return sum(sent(message.kind, message.bytes, ranks) for message in setting.messages(parameters, width, ranks))


@pytest.mark.parametrize(
    ("kind", "ranks", "seconds"),
    [
        # Within a node: rounds of 3 us with an eighth of 8 GB at 400 GB/s.
        ("all-gather", 8, 7 * (3e-6 + 1e9 / 400e9)),
        ("reduce-scatter", 8, 7 * (3e-6 + 1e9 / 400e9)),
        ("all-reduce", 8, 14 * (3e-6 + 1e9 / 400e9)),
        ("all-reduce", 2, 2 * (3e-6 + 4e9 / 400e9)),
        ("all-to-all", 8, 7 * (3e-6 + 1e9 / 400e9)),
        # Two nodes besides: each GPU exchanges an eighth of the vector with its like.
        ("all-gather", 16, 7 * (3e-6 + 1e9 / 400e9) + 10e-6 + 0.5e9 / 40e9),
        ("all-reduce", 16, 14 * (3e-6 + 1e9 / 400e9) + 2 * (10e-6 + 0.5e9 / 40e9)),
        # Every GPU sends a sixteenth to each of the others.
        ("all-to-all", 16, 7 * (3e-6 + 0.5e9 / 400e9) + 8 * (10e-6 + 0.5e9 / 40e9)),
    ],
)
def test_collectives_cost_what_the_formulas_say(kind: str, ranks: int, seconds: float) -> None:
    assert CLUSTER.seconds(kind, 8e9, ranks) == pytest.approx(seconds, rel=1e-12)


def test_trees_carry_small_vectors_between_many_nodes_and_rings_large_ones() -> None:
    inside = CLUSTER.inside.ring("all-reduce", 8.0, 8)
    assert CLUSTER.seconds("all-reduce", 8.0, 1024) - inside == pytest.approx(2 * 7 * 10e-6, rel=1e-3)
    inside = CLUSTER.inside.ring("all-reduce", 8e11, 8)
    assert CLUSTER.seconds("all-reduce", 8e11, 1024) - inside == pytest.approx(254 * (10e-6 + 1e11 / 128 / 40e9))


@pytest.mark.parametrize("stage", STAGES)
def test_one_rank_alone_says_nothing_and_takes_its_own_time(stage: str) -> None:
    parameters, compute = [10**6] * 700, Compute(0.1, 0.2)
    assert volume(zero(stage), parameters, 1) == 0
    messages = zero(stage).messages(parameters, 2, 1)
    assert sum(CLUSTER.seconds(m.kind, m.bytes, 1) for m in messages) == 0
    found = step_seconds(compute, messages, lambda m: CLUSTER.seconds(m.kind, m.bytes, 1), overlap=True)
    assert found == pytest.approx(compute.seconds) == pytest.approx(0.3)


def test_every_stage_sends_its_multiple_of_the_parameters() -> None:
    parameters = [2**20] * 512
    unit = 2 * sum(parameters) * 63 / 64
    released = Zero(stage=3, persistence_threshold=0, reuse_distance=-1)
    multiples = {
        stage: volume(setting, parameters, 64) / unit
        for stage, setting in {
            "0": zero("ddp"), "1": zero("zero1"), "2": zero("zero2"), "3": zero("zero3"), "3, as published": released
        }.items()
    }  # fmt: skip
    assert multiples == pytest.approx({"0": 2, "1": 3, "2": 3, "3": 2, "3, as published": 3}, rel=1e-6)


def test_stage_3_gathers_small_parameters_alone_and_large_ones_twice_only_if_they_are_released() -> None:
    parameters = [100, 7, 100, 100]
    setting = Zero(stage=3, persistence_threshold=10, reuse_distance=10**9, overlap=True)
    setting = replace(setting, prefetch_bucket=200, reduce_bucket=207)
    found = setting.messages(parameters, 4, 2)
    assert [(m.kind, m.bytes, m.part) for m in found] == [
        ("all-gather", 800, "forward"),
        ("all-gather", 400, "forward"),
        ("reduce-scatter", 800, "backward"),
        ("reduce-scatter", 4 * 108, "backward"),
        ("all-reduce", 4, "step"),
        ("all-gather", 4 * 8, "step"),
    ]
    # Behind the first lie 207 elements, which are used twice before it is used again; behind the others fewer.
    some = replace(setting, reuse_distance=400, reduce_bucket=10**8, prefetch_bucket=10**8).messages(parameters, 4, 2)
    assert [(m.kind, m.bytes) for m in some if m.part == "backward"] == [("all-gather", 400), ("reduce-scatter", 1232)]


def test_the_model_follows_the_deepspeed_json() -> None:
    found = zero("zero3")
    assert found == Zero(
        stage=3,
        reduce_bucket=10**8,
        prefetch_bucket=10**8,
        persistence_threshold=10**6,
        reuse_distance=3 * 10**9,
        overlap=True,
    )
    with pytest.raises(ConfigError, match="use_multi_rank_bucket_allreduce"):
        Zero.of({"zero_optimization": {"stage": 1, "use_multi_rank_bucket_allreduce": False}})


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("overlap", [False, True])
def test_efficiency_falls_with_the_number_of_gpus_and_overlap_never_hurts(stage: str, overlap: bool) -> None:
    parameters, compute = (
        parameters_of(Workload(preset="dit-s-4-256").config(Path(), Path()).model),
        Compute(0.01, 0.02),
    )

    def seconds(gpus: int, overlap: bool) -> float:
        messages = zero(stage).messages(parameters, 2, gpus)
        return step_seconds(
            compute, messages, lambda m: CLUSTER.seconds(m.kind, m.bytes, gpus), overlap=overlap
        )  # fmt: skip

    times = [seconds(2**power, overlap) for power in range(11)]
    assert times[0] == pytest.approx(0.03)
    assert all(a < b for a, b in pairwise(times))
    assert all(seconds(2**power, True) <= seconds(2**power, False) + 1e-15 for power in range(11))


def test_overlap_hides_all_but_what_cannot_be_hidden() -> None:
    cost: Callable[[Message], float] = lambda message: message.bytes / 100  # noqa: E731
    compute = Compute(1.0, 2.0)

    def exposed(*messages: Message) -> float:
        return step_seconds(compute, messages, cost, overlap=True) - (1.0 + 2.0)

    half = Message("reduce-scatter", 50, "backward")
    assert exposed(half) == pytest.approx(0.5)  # there is nothing to reduce before the pass ends
    assert exposed(half, half) == pytest.approx(0.5)  # the first beside the second half of the pass
    slow = Message("reduce-scatter", 300, "backward")
    assert exposed(slow, slow) == pytest.approx(1.0 + 3.0 + 3.0 - 2.0)  # the first is ready after half of the pass
    gather = Message("all-gather", 10, "forward")
    assert exposed(gather) == pytest.approx(0.1)
    assert exposed(gather, gather) == pytest.approx(0.1)  # the second beside the first half of the pass
    wide = Message("all-gather", 100, "forward")
    assert exposed(wide, wide) == pytest.approx(1.0 + 1.0 + 0.5 - 1.0)
    early = Message("all-gather", 100, "backward")
    assert exposed(half, early) == pytest.approx(0.5)
    assert exposed(Message("all-gather", 30)) == pytest.approx(0.3)
