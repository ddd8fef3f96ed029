"""The prediction of a step beside published measurements, and where the host limits it."""

from __future__ import annotations

import pytest

from fastdiff.planning.scaling.communication import Cluster, Compute, Link, Message
from fastdiff.planning.scaling.estimate import Estimate, estimate
from fastdiff.planning.scaling.host import Host
from fastdiff.planning.scaling.zero import Zero
from fastdiff_bench.measure.workload import Workload
from fastdiff_bench.scaling import host
from fastdiff_bench.scaling.host import fit
from fastdiff_bench.scaling.published import DDP_BEATS_ZERO, PUBLISHED, Published

NODES = Cluster(8, Link(3e-6, 0.8 * 450e9), Link(8e-6, 0.8 * 50e9))
DIT_XL = 675_129_632, 292


def predicted(stage: int, parameters: int, tensors: int, seconds: float, gpus: int, copies: bool = True) -> Estimate:
    name = "ddp" if stage == 0 else f"zero{stage}"
    zero = Zero.of(Workload(preset="digits", deepspeed=name).deepspeed_json())
    messages = zero.messages([parameters // tensors] * tensors, 2, gpus, 4)
    return estimate(
        Compute(seconds / 3, 2 * seconds / 3),
        messages,
        lambda message: NODES.seconds(message.kind, message.bytes, gpus),
        gpus,
        overlap=zero.overlap,
        copied=(stage, parameters) if copies else None,
        host=(host.read()[stage], tensors),
    )


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: case.what)
def test_published_scaling_is_predicted_better_than_by_1(case: Published) -> None:
    """A model that always answered 1 would be less than 3 % off."""
    fewer, more = (
        predicted(case.stage, case.parameters, case.tensors, case.step_seconds, gpus, copies=False)
        for gpus in (case.fewer, case.more)
    )
    found = fewer.step.middle / more.step.middle
    assert abs(found - case.efficiency) < 1 - case.efficiency


def test_ddp_is_predicted_to_be_fastest_where_published_runs_are() -> None:
    """The published loss (65 %) is not reached: it is of the host, at ten times the time of a tensor measured here."""
    _, rates, alone = DDP_BEATS_ZERO
    found = {stage: predicted(stage, 3_400_000_000, 800, 13 / alone, 8).step.high for stage in rates}
    assert rates[0] > rates[1] > rates[2]
    assert found[0] <= found[1] <= found[2]


def test_zero_3_is_not_first_where_the_host_limits() -> None:
    """14 images per GPU take 20 ms of an H200: every stage waits for the host, ZeRO-3 the longest."""
    found = [predicted(stage, *DIT_XL, 0.02, 8) for stage in range(4)]
    assert [one.limit for one in found] == ["host"] * 4
    assert max(found, key=lambda one: one.step.middle) is found[3]
    assert found[3].step.low > min(one.step.high for one in found)


def test_a_long_step_hides_the_host() -> None:
    """256 images per GPU take 365 ms: the stages differ by the messages that they cannot hide, a few percent."""
    found = [predicted(stage, *DIT_XL, 0.365, 8).step for stage in range(4)]
    assert all(0.98 * 0.365 < step.low <= step.middle <= step.high < 1.1 * 0.365 for step in found)
    assert [predicted(stage, *DIT_XL, 0.365, 8).limit for stage in range(4)] == ["device"] * 4


def test_nccl_takes_a_share_of_what_it_overlaps_and_copies_take_memory() -> None:
    compute = Compute(0.1, 0.2)
    messages = [Message("all-gather", 10**9, "forward"), Message("reduce-scatter", 10**9, "backward")]
    found = estimate(compute, messages, lambda _: 0.05, 8, overlap=True, copied=None)
    hidden = 0.05 + 0.05  # both messages overlap their pass
    exposed = found.device.middle - 24 / 132 * hidden
    assert found.device.low == pytest.approx(exposed + 16 / 132 * hidden)
    assert found.device.high == pytest.approx(exposed + 32 / 132 * hidden)
    copied = estimate(compute, messages, lambda _: 0.05, 8, overlap=True, copied=(0, 10**9))
    assert copied.device.middle - found.device.middle == pytest.approx(1e9 * (40 + 8 / 8 - 38) / 4.0e12)
    assert found.host is None
    assert found.limit == "device"


def test_the_host_time_is_a_line_through_two_depths() -> None:
    found = fit([50, 250], [0.03, 0.07])
    assert (found.fixed, found.per_tensor) == (pytest.approx(0.02), pytest.approx(2e-4))
    assert found.seconds(100, 2.0) == pytest.approx(0.02)
    assert fit([50, 250], [0.03, 0.02]) == Host(pytest.approx(0.03), 0.0)


def test_the_committed_record_has_every_stage() -> None:
    found = host.read()
    assert set(found) == {0, 1, 2, 3}
    assert found[3].seconds(292) > found[1].seconds(292) > 0.01
