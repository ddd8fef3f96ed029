"""The model of a step beside published scaling, and where the host or the links limit it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastdiff.planning import gpus
from fastdiff.planning.kernels import Kernels
from fastdiff.planning.options import OF_STAGE
from fastdiff.planning.rates import MIDDLE, SUSTAINED
from fastdiff.planning.scaling.zero import Zero
from fastdiff.planning.step_time import Factors, StepTime, Work, messages, step_time, update_seconds

DIT_XL, LLAMA = (675_129_632, 292), (8_030_261_248, 291)
_TOKENS = 2 * 8192
"""Per GPU and step: local batch 2, sequences of 8,192 tokens, the default of that configuration."""
TITAN = ((5762, 5605), (6667, 6514), (8532, 8380))
"""Tokens per second and GPU of Llama 3.1 8B on 8 and on 128 H100, FSDP: eager, compiled, and compiled with float8
(https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md)."""


def work(stage: int, network: tuple[int, int], seconds: float, on: gpus.Gpus) -> Work:
    """Work whose passes take these seconds, of a network of equal parameters."""
    parameters, tensors = network
    taken = Kernels(kind="streaming", bytes=seconds * MIDDLE.streaming * on.kind.bandwidth)
    return Work(
        kernels=(taken,), dtype="bf16", micro=1, accumulation=1, zero=Zero.of(OF_STAGE[stage]),
        parameters=(parameters // tensors,) * tensors, frozen=(), width=2, sums=4, state_bytes=8, recomputed=0.0,
    )  # fmt: skip


def predicted(stage: int, network: tuple[int, int], seconds: float, name: str) -> StepTime:
    on = gpus.parse(name, gpus.known())
    return step_time(work(stage, network, seconds, on), on)


@pytest.mark.parametrize(("few", "many"), TITAN)
def test_published_scaling_is_predicted_better_than_by_1(few: int, many: int) -> None:
    """A model that always answered 1 would be less than 3 % off."""
    seconds, eight, sixteen_nodes = _TOKENS / few, *(gpus.parse(f"{n}xH100", gpus.known()) for n in (8, 128))
    alone = seconds - update_seconds(work(3, LLAMA, seconds, eight), eight, MIDDLE)
    found = [step_time(work(3, LLAMA, alone, on), on).whole.middle for on in (eight, sixteen_nodes)]
    assert abs(found[0] / found[1] - many / few) < 1 - many / few


def test_zero_3_is_not_first_where_the_host_limits() -> None:
    """A twentieth of the network, whose pass takes 2 ms: every stage waits for the host, ZeRO-3 the longest."""
    parameters, tensors = DIT_XL
    found = [predicted(stage, (parameters // 20, tensors), 0.002, "8xH200") for stage in range(4)]
    assert [one.limit for one in found] == ["host"] * 4
    assert max(found, key=lambda one: one.whole.middle) is found[3]


def test_a_long_step_hides_the_host() -> None:
    """256 images per GPU take 365 ms: the stages differ by what they cannot hide, a few percent."""
    found = [predicted(stage, DIT_XL, 0.365, "8xH200") for stage in range(4)]
    assert [one.limit for one in found] == ["device"] * 4
    assert all(0.365 < one.whole.middle < 1.1 * 0.365 for one in found)


def test_nccl_takes_a_share_of_the_pass_that_it_overlaps() -> None:
    on = gpus.parse("8xH200", gpus.known())
    alone = work(0, DIT_XL, 0.365, on)
    hidden = sum(on.cluster.seconds(one.kind, one.bytes, 8) for one in messages(alone, on))
    apart, update = replace(alone, zero=replace(alone.zero, overlap=False)), update_seconds(alone, on, MIDDLE)
    assert step_time(apart, on).whole.middle == pytest.approx(0.365 + hidden + update)
    beside = step_time(alone, on).whole.middle
    assert 24 / 132 * hidden < beside - 0.365 - update < 24 / 132 * hidden + 0.1 * hidden


def test_smaller_state_saves_bytes_of_the_update() -> None:
    on = gpus.parse("H200", gpus.known())
    whole = work(0, DIT_XL, 0.365, on)
    saved = update_seconds(whole, on, MIDDLE) - update_seconds(replace(whole, state_bytes=2), on, MIDDLE)
    assert saved == pytest.approx(2 * 6 * sum(whole.parameters) / (MIDDLE.update * 4.8e12))


H200 = gpus.parse("H200", gpus.known())
RECORD = Path(__file__).parents[2] / "bench" / "results" / "nvidia-h200" / "2026-11-26_gpu" / "step.jsonl"
AS_MEASURED: dict[str, Any] = json.loads(Path(__file__).with_name("dit_xl_as_measured.json").read_text())
"""Counts of DiT-XL/2 at the code that an H200 measured; they stay while the kernels improve."""
ROWS = tuple(Kernels(**row) for row in AS_MEASURED["kernels"])


@pytest.mark.parametrize("name", AS_MEASURED["measured"])
def test_counted_kernels_of_a_block_take_what_an_h200_measured(name: str) -> None:
    """Within 20 %, with the same constants for all; of four blocks in milliseconds."""
    rows = [row for row in ROWS if row.name.endswith(f" {name}")]
    seconds = sum(row.seconds(H200.kind, "bf16", MIDDLE) for row in rows)
    milliseconds = 1e3 * seconds * AS_MEASURED["batch"] * 4 / AS_MEASURED["blocks"]
    assert milliseconds == pytest.approx(AS_MEASURED["measured"][name], rel=0.2)


def test_the_step_of_counted_kernels_takes_what_an_h200_measured() -> None:
    lines = [json.loads(line).get("measurement", {}) for line in RECORD.read_text().splitlines()]
    measured = next(1e-3 * line["value"] for line in lines if line.get("quantity") == "step time")
    count, tensors = AS_MEASURED["parameters"], AS_MEASURED["tensors"]
    step = replace(
        work(1, (count, tensors), 0.0, H200), kernels=ROWS, micro=AS_MEASURED["batch"]
    )  # fmt: skip
    whole = step_time(step, H200, Factors(passes=SUSTAINED)).whole
    assert whole.middle == pytest.approx(measured, rel=0.05)
    assert whole.low < measured < whole.high


def test_the_resource_that_binds_decides_and_a_close_one_lengthens() -> None:
    gpu = H200.kind
    by_bytes = Kernels(kind="counted", bytes=1e9)
    alone = by_bytes.seconds(gpu, "bf16", MIDDLE)
    slots = 1e9 / gpu.copy_rate * gpu.known_multiprocessors().issue  # of the same time
    few = replace(by_bytes, instructions=0.3 * slots).seconds(gpu, "bf16", MIDDLE)
    as_many = replace(by_bytes, instructions=slots).seconds(gpu, "bf16", MIDDLE)
    assert few == pytest.approx(alone, rel=0.01)
    assert as_many == pytest.approx(2 ** (1 / 3) * alone)
    assert replace(by_bytes, idle=1.55).seconds(gpu, "bf16", MIDDLE) == pytest.approx(1.55 * alone)
    assert Kernels(kind="counted", launches=1000).seconds(gpu, "bf16", MIDDLE) == pytest.approx(1.8e-3)
