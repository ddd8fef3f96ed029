"""Timing of calls, and the measured limits of a machine."""

import time
from collections.abc import Callable

import pytest
import torch

from fastdiff_bench.measure import roofline as limits
from fastdiff_bench.measure import timing
from fastdiff_bench.measure.timing import Effort, Stopwatch, Timing
from fastdiff_bench.records.record import Measurement


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of a size for a test."""
    monkeypatch.setattr(timing, "_FLUSHED_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(limits, "_COPIED_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(limits, "_SIDE", {"cpu": 64})


def test_calls_take_turns_until_each_ran_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only the calls advance; the times of three rounds are read together."""
    calls: list[str] = []
    now = [0.0]

    def call(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            calls.append(name)
            now[0] += seconds

        return run

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    watch = Stopwatch("cpu", Effort(repetitions=3, seconds=8, limit_seconds=60, warm_up_seconds=0))
    timings = watch.measure({"slow": call("slow", 2), "fast": call("fast", 1)})
    assert calls == ["slow", "fast"] * (1 + 9), "one round warms up"
    assert timings == {"slow": Timing(2.0, 2.0, 2.0, 9), "fast": Timing(1.0, 1.0, 1.0, 9)}


def test_the_limit_ends_the_repetitions_but_not_before_the_least_number() -> None:
    watch = Stopwatch("cpu", Effort(repetitions=20, seconds=1e9, limit_seconds=0, warm_up_seconds=0))
    assert watch.measure({"nothing": lambda: None})["nothing"].repetitions == 20


def test_a_timing_is_the_median_and_the_outer_fifths() -> None:
    assert Timing.of([float(n) for n in range(11)]) == Timing(5.0, 2.0, 8.0, 11)


def test_a_rate_is_largest_where_the_time_was_smallest() -> None:
    assert Timing(2.0, 1.0, 4.0, 5).per_second(8.0) == Timing(4.0, 2.0, 8.0, 5)
    assert Timing(2.0, 1.0, 4.0, 5).times(10) == Timing(20.0, 10.0, 40.0, 5)


def test_a_time_is_launch_bound_if_most_calls_kept_the_device_waiting() -> None:
    seconds = [1.0, 1.0, 1.0]
    assert not Timing.of(seconds).launch_bound
    assert not Timing.of(seconds, [0.04, 0.0, 0.04]).launch_bound
    assert not Timing.of(seconds, [0.0, 0.9, 0.0]).launch_bound
    bound = Timing.of(seconds, [0.06, 0.06, 0.0])
    assert bound.launch_bound
    assert bound.per_second(2.0).launch_bound
    assert bound.times(2.0).launch_bound


def test_a_cpu_is_never_launch_bound() -> None:
    assert not Stopwatch("cpu", timing.QUICK).measure({"idle": lambda: time.sleep(0.01)})["idle"].launch_bound


@pytest.mark.gpu
def test_only_what_the_device_waited_for_is_launch_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads its buffer in at least 0.05 ms, so that a launch of a few us is hidden, and one of 5 ms is not."""
    monkeypatch.setattr(timing, "_FLUSHED_BYTES", {"cuda": 2**29})
    x, large = torch.zeros(1000, device="cuda"), torch.zeros(8192, 8192, device="cuda")

    def late(call: Callable[[], object]) -> Callable[[], object]:
        return lambda: (time.sleep(0.005), call())

    found = Stopwatch("cuda", timing.FULL).measure(
        {"small": x.sin, "late": late(x.sin), "large": lambda: large @ large}
    )
    assert {name: timing.launch_bound for name, timing in found.items()} == {
        "small": False, "late": True, "large": False,
    }  # fmt: skip
    assert found["late"].median > 0.004


def test_limits_are_bytes_and_operations_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of the clock is a millisecond after the one before, so that every repetition takes one."""
    clock = iter(range(10**6))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) * 1e-3)
    found = limits.measure("cpu", timing.QUICK)
    assert found.copy_bytes_per_s == pytest.approx(2 * 2**20 / 1e-3)
    assert found.matmul_flops_per_s == pytest.approx({"fp32": 2 * 64**3 / 1e-3, "bf16": 2 * 64**3 / 1e-3})


def test_limits_are_measurements_of_the_command_that_asks() -> None:
    rate = Timing(3e12, 2e12, 4e12, 20)
    rows = limits.Limits(Timing(2e9, 1e9, 3e9, 20), {"fp32": rate}).measurements("step")
    assert rows == [
        Measurement(
            bench="step", case="limits", provider="torch", quantity=quantity, unit=unit, value=value, p20=value - 1,
            p80=value + 1, n=20, better="neither",
        )
        for quantity, unit, value in (("copy bandwidth", "GB/s", 2), ("matmul rate fp32", "TFLOP/s", 3))
    ]  # fmt: skip
