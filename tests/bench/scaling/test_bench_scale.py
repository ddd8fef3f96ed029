"""``bench scale``: ranks send exactly the bytes of the model, and the records of the command."""

import json
import multiprocessing
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastdiff.parallel.world import World
from fastdiff.planning.scaling.zero import Zero, parameters_of, width_of
from fastdiff.planning.step_time import Host
from fastdiff_bench.__main__ import main
from fastdiff_bench.measure import synthetic
from fastdiff_bench.measure.session import Enough, StepTimer
from fastdiff_bench.measure.workload import Workload
from fastdiff_bench.records import record
from fastdiff_bench.records.record import Failure, Log, Measurement
from fastdiff_bench.scaling import host
from fastdiff_bench.scaling.command import consensus
from fastdiff_bench.trainers import collectives
from tests.support.processes import ROOT, run_ranks

pytestmark = pytest.mark.usefixtures("forked")

STEPS = 4
CASES = [
    ("ddp", "fp32"),
    ("ddp", "bf16"),
    ("zero1", "bf16"),
    ("zero2", "bf16"),
    ("zero3", "fp32"),
    ("small buckets", "fp32"),
    ("sharded", "bf16"),
]
IN_ORDER = [("zero1", "bf16"), ("zero3", "fp32"), ("sharded", "bf16")]
"""With sums in the order of the micro-batches."""


def deepspeed_file(folder: Path, name: str) -> str:
    """A file of ``deepspeed_configs/``, or one of this name with buckets for a small model."""
    changes: dict[str, tuple[str, dict[str, int]]] = {
        "small buckets": ("zero1", {"reduce_bucket_size": 300_000}),
        "sharded": ("zero3", {"stage3_param_persistence_threshold": 10_000}),
    }
    if name not in changes:
        return name
    base, changed = changes[name]
    config = json.loads((ROOT / "deepspeed_configs" / f"{base}.json").read_text())
    config["zero_optimization"] |= changed
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    return str(path)


def count(world: World, data: Path, workloads: list[Workload]) -> list[list[list[Any]]]:
    """The collectives of the last of a few steps of each, on this rank."""
    found = []
    for workload in workloads:
        bench, mine = multiprocessing.Pipe()
        for steps in (STEPS, 0):
            bench.send(steps)
        timer = StepTimer(mine, torch.device("cpu"))
        with pytest.raises(Enough):
            collectives.run(timer, workload, data, (STEPS - 2, STEPS))
        first, last = json.loads(str(timer.facts["calls"]))
        assert [call[:2] for call in first] == [call[:2] for call in last]
        found.append(last)
    assert torch.distributed.all_reduce.__module__.startswith("torch")
    torch.distributed.all_reduce(torch.ones(1))  # the methods are as they were
    rooted: list[collectives.Call] = []
    parts, part = ([torch.ones(3), torch.ones(3)] if world.is_first else None), torch.ones(3)
    with collectives.recording(rooted):
        torch.distributed.gather(part, parts)
        torch.distributed.scatter(part, parts)
    assert [call[:2] for call in rooted] == [("gather", 12), ("scatter", 12)]
    return found


def test_two_ranks_send_exactly_what_the_model_says(tmp_path: Path) -> None:
    """From Python, that is: DDP's map of used parameters, sent by C++, is in neither."""
    workloads = [
        Workload(preset="digits", batch=4, deepspeed=deepspeed_file(tmp_path, name), precision=dtype, loader="prefetch")
        for name, dtype in CASES
    ]
    workloads += [replace(workloads[CASES.index(case)], micro=2, grad_accum_order="micro_batches") for case in IN_ORDER]
    model = workloads[0].config(tmp_path, tmp_path).model
    data = synthetic.write(tmp_path / "data", model, 64)
    first, second = run_ranks(count, data, workloads, ranks=2)
    for workload, case, calls, others in zip(workloads, [*CASES, *IN_ORDER], first, second, strict=True):
        assert [call[:2] for call in calls] == [call[:2] for call in others], case
        assert all(0 < seconds < 60 for *_, seconds in calls)
        zero = replace(Zero.of(workload.deepspeed_json()), in_order=workload.grad_accum_order is not None)
        messages = zero.messages(parameters_of(model), width_of(case[1]), 2, width_of("fp32"))
        seen = sorted((kind, size) for kind, size, _ in calls)
        model_says = sorted((message.kind, message.bytes) for message in [*messages, consensus(zero.stage)])
        if case[0] == "small buckets":  # which gradients share one is up to the order in which autograd has them
            assert volumes(seen) == volumes(model_says)
            assert abs(len(seen) - len(model_says)) <= 1
            assert all(size <= 4 * 300_000 for kind, size in seen if kind == "all-reduce")
        else:
            assert seen == model_says, case


def volumes(calls: list[tuple[str, int]]) -> Counter[str]:
    """Bytes of each kind."""
    found: Counter[str] = Counter()
    for kind, size in calls:
        found[kind] += size
    return found


@pytest.mark.nightly
def test_the_command_measures_ranks_apart_and_together(tmp_path: Path, capfd: Any) -> None:
    assert main(["scale", "--smoke", "--device", "cpu", "--out", str(tmp_path)]) == 0
    found = record.read(tmp_path / "scale.jsonl")
    assert found.failures == ()
    rows = {(m.provider, m.quantity): m for m in found.measurements}
    assert len(rows) == len(found.measurements)
    assert {m.bench for m in found.measurements} == {"scale"}
    together = rows["zero3, 2 ranks", "bytes sent"]
    assert together.value == pytest.approx(together.facts["by the model"])
    kinds = ("all-gather", "reduce-scatter", "all-reduce")
    assert together.value == pytest.approx(sum(float(together.facts[kind] or 0) for kind in kinds))
    assert together.value > 1
    assert rows["zero3, 1 rank", "bytes sent"].value == 0
    assert rows["zero3, 2 ranks", "collectives"].value > rows["zero3, 1 rank", "collectives"].value
    for name in ("zero3, 1 rank", "zero3, 2 ranks apart", "zero3, 2 ranks"):
        assert rows[name, "step time"].value > 0
    printed = capfd.readouterr().out
    assert "measured  " in printed


def step_record(folder: Path, memory: str = "peak allocated", step_ms: float = 400.0, **facts: Any) -> Path:
    """A record as ``bench step`` writes it on an H200: the steps with marks take 5 % longer."""
    given: dict[str, Any] = {
        "preset": "dit-xl-2-256",
        "precision": "bf16",
        "deepspeed": "zero3",
        "batch": 256,
        "micro": None,
    }
    model = Workload(preset="dit-xl-2-256").config(Path(), Path()).model
    given |= {"parameters": sum(parameters_of(model))} | facts
    given["marked_step_ms"] = 1.05 * step_ms
    marked = {"forward": 136.5, "backward": 252.0, "optimizer": 21.0, "ema": 4.2, "other": 6.3}
    phases = ((f"phase {name}", ms * step_ms / 400) for name, ms in marked.items())
    rows = [("step time", step_ms), (memory, 1.0), *phases]
    with Log(folder / "step.jsonl") as log:
        for quantity, value in rows:
            log.write(
                Measurement(
                    bench="step", case="dit-xl-2-256", provider="fastdiff zero3", quantity=quantity, unit="ms",
                    value=value, better="lower", facts=given,
                )
            )  # fmt: skip
        log.write(Failure(bench="step", case="dit-xl-2-256", provider="other", reason="none"))
    lines = log.path.read_text().splitlines(keepends=True)
    fingerprint = json.loads(lines[0])
    fingerprint["fingerprint"]["device"] = "NVIDIA H200"
    log.path.write_text("".join([json.dumps(fingerprint) + "\n", *lines[1:]]))
    return log.path


def test_a_record_of_one_gpu_predicts_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = step_record(tmp_path)
    given = ["--stages", "zero1", "zero3", "--gpus", "1", "8", "1024"]
    assert main(["scale", "--from", str(source), *given, "--out", str(tmp_path / "out")]) == 0
    found = record.read(tmp_path / "out" / "scale.jsonl").measurements
    times = {m.provider: m for m in found if m.quantity == "predicted step time"}
    assert list(times) == [f"{stage}, {count} GPUs" for stage in ("zero1", "zero3") for count in (1, 8, 1024)]
    assert times["zero3, 1 GPUs"].value == pytest.approx(400)
    assert times["zero1, 1 GPUs"].value == pytest.approx(400, rel=0.02)
    many = times["zero3, 1024 GPUs"]
    assert (many.facts["gpus"], many.facts["device"], many.facts["between, GB/s per GPU"]) == (1024, "NVIDIA H200", 50)
    [efficiency] = (m.value for m in found if m.name == (*many.name[:3], "predicted efficiency"))
    assert efficiency == pytest.approx(400 / many.value)
    printed = capsys.readouterr().out
    assert f"{100 * efficiency:.1f} %" in printed
    assert "400.0 ms per step of 1 on NVIDIA H200" in printed


def test_a_step_that_contains_its_host_is_not_charged_for_it_again(tmp_path: Path) -> None:
    """The step is shorter than that of the record's host at any speed: the processor beside the GPU was faster."""
    source = step_record(tmp_path, step_ms=30.0, deepspeed="zero1")
    assert main(["scale", "--from", str(source), "--stages", "zero1", "--gpus", "1", "--out", str(tmp_path)]) == 0
    predicted = {m.quantity: m for m in record.read(tmp_path / "scale.jsonl").measurements}
    assert predicted["predicted efficiency"].value == pytest.approx(1)


def test_messages_overlap_where_the_deepspeed_json_says_so() -> None:
    def parts(**section: Any) -> set[str]:
        messages = Zero.of({"zero_optimization": section}).messages([1000, 2_000_000], 2, 8)
        return {message.part for message in messages if message.bytes > 8}

    assert parts(stage=1) == parts(stage=2, overlap_comm=False) == parts(stage=3, overlap_comm=False) == {"step"}
    assert parts(stage=2, overlap_comm=True) == {"backward", "step"}
    assert parts(stage=3) == {"forward", "backward", "step"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--from", "{gpu}", "--preset", "digits"], "--preset has no effect with --from"),
        (["--from", "{gpu}", "--device", "cpu"], "--device has no effect with --from"),
        (["--device", "cpu", "--gpus", "8"], "--gpus has no effect without --from"),
        (["--from", "{gpu}", "--stages", "zero3_offload"], "offloads the optimizer"),
        (["--from", "{gpu}", "--gpus", "12"], "--gpus 12xH200: 12 fill no whole nodes of 8"),
        (["--device", "cpu", "--stages", "{on_host}"], "sets offload_param"),
        (["--from", "{folder}/none.jsonl"], "none.jsonl: FileNotFoundError"),
        (["--from", "{cpu}"], "measured on cpu, which is no GPU of the table"),
        (["--device", "cpu", "--ranks", "0"], "--ranks 0: expected at least 1$"),
        (["--device", "cpu", "--batch", "0"], "--batch 0: expected at least one sample"),
        (["--device", "cpu", "--stages", "zero9"], "zero9: no such file"),
    ],
)
def test_impossible_requests_are_one_message(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("cpu", "gpu"):
        (tmp_path / name).mkdir()
    places = {
        "folder": tmp_path,
        "cpu": step_record(tmp_path / "cpu", memory="peak resident"),
        "gpu": step_record(tmp_path / "gpu"),
        "on_host": tmp_path / "on_host.json",
    }
    section = {"stage": 3, "offload_param": {"device": "cpu"}}
    places["on_host"].write_text(json.dumps({"zero_optimization": section}))
    given = [flag.format(**places) for flag in flags]
    assert main(["scale", "--out", str(tmp_path), *given]) == 2
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])


def test_the_host_time_is_a_line_through_two_depths() -> None:
    found = host.fit([50, 250], [0.03, 0.07])
    assert (found.fixed, found.per_tensor) == (pytest.approx(0.02), pytest.approx(2e-4))
    assert found.seconds(100, 2.0) == pytest.approx(0.02)
    assert host.fit([50, 250], [0.03, 0.02]) == Host(pytest.approx(0.03), 0.0)
