"""Running out of memory: what fills it, what would fit, and the end of all ranks with one message."""

import errno
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fastdiff.checkpoint import staging
from fastdiff.checkpoint.staging import HostCopy
from fastdiff.checkpoint.unchanged import config_changes
from fastdiff.config.command_line import train_flags
from fastdiff.config.networks.pretrained import PretrainedConfig
from fastdiff.config.presets import preset
from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import as_json
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.config.sections.output import OutputConfig
from fastdiff.errors import ConfigError, FastdiffError, NoMemoryError, StorageError
from fastdiff.models.cost.memory import Setup, buffer_bytes, exhausted, explain, frozen_bytes, remedies
from fastdiff.parallel.world import World
from fastdiff.training.engines.deepspeed import DeepSpeedEngine
from fastdiff.training.loop import train
from fastdiff.training.memory.explanation import _cache_and_room, explaining_memory
from fastdiff.training.state import TrainState
from tests.support.injected.lack_of_memory import Lack, Where, environment
from tests.support.processes import deepspeed
from tests.support.runs import flags, launch, tiny

GIB = 2**30
SETUP = Setup(
    trained=GIB,
    frozen_bytes=0,
    buffer_bytes=0,
    ranks=4,
    stage=1,
    flat=False,
    offload=False,
    precision="bf16",
    sums="fp32",
    optimizer="adamw",
    averages=1,
    micro=8,
    recompute=False,
    several=True,
)
SMALLEST = replace(SETUP, micro=1, recompute=True, optimizer="adamw8bit", stage=3, offload=True, sums="bf16")
"""A run that has every remedy."""
RUN = preset("digits")


@pytest.mark.parametrize(
    ("where", "micro"),
    [
        ("construction", 8),
        ("forward", 1),  # cannot be halved
        pytest.param("backward", 1, marks=pytest.mark.nightly),
        pytest.param("step", 1, marks=pytest.mark.nightly),
    ],
)
def test_out_of_memory_ends_all_ranks_with_one_message(digits: Path, tmp_path: Path, where: Where, micro: int) -> None:
    """What is built does not depend on the micro-batch: no smaller one is tried or advised, nor recomputation."""
    config = tiny(digits, tmp_path / "run", batch__micro=micro)
    lack = environment(Lack(where, rank=1), tmp_path / "lack")
    done = deepspeed(*flags(config), "--deepspeed_config", "zero1", ranks=2, **lack)
    assert done.code == 70, done.output
    [message] = [line for line in done.output.splitlines() if "fastdiff: error" in line]
    parts = ", ".join(rf"{kind} \d+\.\d\d" for kind in ("weights", "gradients", "optimizer", "averages", "activations"))
    flag = r"--[a-z_.0-9/ -]+ \(\d+\.\d\d GiB(, starts its moments anew)?\)"
    assert re.search(
        rf"error \(rank 1\): out of memory in (the )?{where}[ a-z,]* on cpu, .*: {parts}, cache \d+\.\d\d GiB\. "
        rf"Predicted to fit: {flag} or {flag} or {flag}\. .*CUDA out of memory",
        message,
    ), message
    assert "Traceback" not in done.output
    if where == "construction":
        assert not re.search(r"--batch\.micro|--performance\.recompute", message)


def test_host_memory_that_does_not_suffice_is_explained_too(world: World, digits: Path, tmp_path: Path) -> None:
    class Large(DeepSpeedEngine):
        def backward(self, loss: torch.Tensor, *, discard: bool = False) -> None:
            torch.empty(2**48)

    with (
        mock.patch("fastdiff.training.engines.deepspeed.DeepSpeedEngine", Large),
        pytest.raises(NoMemoryError, match=r"out of memory in the first forward and .* on cpu.*DefaultCPUAllocator"),
    ):
        train(tiny(digits, tmp_path / "run", batch__micro=1), launch(1), world)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (2, 4, 3, 1)),  # of 4 ranks: (4 bytes of masters + 8 of moments) / 4
        ({"stage": 0}, (2, 4, 12, 1)),
        ({"stage": 0, "flat": True}, (2, 6, 12, 1)),  # .grad in bf16 beside the sums
        ({"stage": 2, "flat": True}, (2, 1, 3, 1)),  # as a remedy
        ({"stage": 2}, (2, 1, 3, 1)),
        ({"stage": 3}, (0.5, 1, 3, 1)),
        ({"stage": 3, "offload": True}, (0.5, 1, 0, 0)),
        ({"several": False}, (2, 2, 3, 1)),
        ({"precision": "fp32", "stage": 0}, (4, 4, 8, 1)),
        ({"optimizer": "adamw8bit", "averages": 0}, (2, 4, 1.5, 0)),
        ({"stage": 3, "frozen_bytes": GIB, "buffer_bytes": GIB}, (1.75, 1, 3, 1)),  # ZeRO leaves buffers whole
    ],
)
def test_bytes_per_parameter(changes: dict[str, object], expected: tuple[float, ...]) -> None:
    held = replace(SETUP, **changes).static()  # type: ignore[arg-type]
    assert tuple(size / GIB for size in held.values()) == expected
    assert list(held) == ["weights", "gradients", "optimizer", "averages"]


def test_three_flags_that_fit_are_named_least_change_first() -> None:
    found = {flag: size / GIB for flag, size in remedies(SETUP, activations=8 * GIB, room=15 * GIB)}
    assert found == {
        "--batch.micro 4": 14.0,
        "--performance.recompute": 12.0,
        "--deepspeed_config zero2": 15.0,
    }


def test_blocks_that_keep_their_activations_are_recomputed_as_well() -> None:
    """Half of them: of a quarter, and half of the rest, the quarter is left."""
    half = replace(SETUP, recompute=True, stored=0.5)
    found = {flag: size / GIB for flag, size in remedies(half, activations=8 * GIB, room=15 * GIB)}
    assert found["--performance.stored_blocks 0"] == pytest.approx(10 + 8 * 0.25 / 0.625)
    [strongest, *_] = remedies(half, activations=8 * GIB, room=2 * GIB)
    assert strongest[0].startswith("--batch.micro 1 --performance.stored_blocks 0 --optim.name adamw8bit")


def test_where_no_flag_suffices_the_combinations_that_need_least_are_named() -> None:
    found = remedies(SETUP, activations=8 * GIB, room=2 * GIB)
    assert [size for _, size in found] == sorted(size for _, size in found)
    assert found[0][0].split() == [
        *("--batch.micro", "1", "--performance.recompute", "--optim.name", "adamw8bit"),
        *("--allow-change", "optim.name", "--deepspeed_config", "zero3_offload"),
    ]


def told(setup: Setup = SETUP, activations: int = 8, room: int = 15, cause: str = "CUDA\nmore") -> str:
    """The message; memory in GiB."""
    return explain(
        setup, phase="step", device="cuda:0", activations=activations * GIB, cache=GIB, room=room * GIB, cause=cause
    )


def test_the_message_says_what_fills_the_memory_and_what_would_fit() -> None:
    found = told()
    assert "15.00 GiB for this rank: weights 2.00, gradients 4.00, optimizer 3.00, averages 1.00, " in found
    assert "activations 8.00, cache 1.00 GiB. Predicted to fit: --batch.micro 4 (14.00 GiB) or" in found
    assert found.endswith("(CUDA)")
    assert "zero3_offload (1.75 GiB, starts its moments anew, still too much) or" in told(room=1)
    assert "such a flag" not in told(SMALLEST)
    assert "No flag is left; use more ranks or larger GPUs (CUDA)" in told(SMALLEST)


@pytest.mark.parametrize(
    ("has", "never"),
    [
        ({"micro": 1}, "--batch.micro"),
        ({"recompute": True}, "--performance.recompute"),
        ({"recompute": True}, "--performance.stored_blocks"),
        ({"recompute": True, "stored": 0.5}, "--performance.recompute"),
        ({"optimizer": "adamw8bit"}, "--optim.name"),
        ({"optimizer": "adamw8bit-bnb"}, "--optim.name"),
        ({"stage": 3, "offload": True}, "--deepspeed_config"),
        ({"sums": "bf16"}, "--performance.grad_accum_dtype"),
    ],
)
@pytest.mark.parametrize("room", [1, 15])
def test_a_remedy_that_the_run_has_is_not_named(has: dict[str, Any], never: str, room: int) -> None:
    found = remedies(replace(SETUP, **has), activations=8 * GIB, room=room * GIB)
    assert found
    assert not [flag for flag, _ in found if never in flag]
    assert remedies(SMALLEST, activations=8 * GIB, room=GIB) == []


@pytest.mark.parametrize("micro", [1, 2, 3, 6, 7, 8, 45])
def test_advice_is_accepted_when_it_is_followed(tmp_path: Path, micro: int) -> None:
    """By the parser, by the division of the batch, and by a resume; whatever room there is."""
    given = ["--preset", "digits", "--output.folder", str(tmp_path), "--performance.precision", "bf16"]
    given += ["--batch.samples", str(micro * 4), "--samples", str(micro * 40), "--batch.micro", str(micro)]
    given += ["--optim.schedule", "constant", "--optim.warmup_steps", "0"]
    _, before = train_flags.parse([*given, "--performance.grad_accum_dtype", "fp32"])
    setups = [
        SETUP,
        replace(SETUP, optimizer="adamw8bit", stage=3),
        replace(SETUP, recompute=True, offload=True, stage=3),
    ]
    if micro == 8:
        given += ["--performance.recompute", "--performance.stored_blocks", "1"]
        _, before = train_flags.parse([*given, "--performance.grad_accum_dtype", "fp32"])
        setups.append(replace(SETUP, recompute=True, stored=0.5))
    found: set[str] = set()  # many rooms have the same advice
    for room in (1, 4, 8, 12, 15):
        named = {flag for setup in setups for flag, _ in remedies(replace(setup, micro=micro), 8.0 * GIB, room * GIB)}
        assert named
        found |= named
    for flag in found:
        start, config = train_flags.parse([*given, *flag.split()])
        assert config.batch.accumulation(4) >= before.batch.accumulation(4)
        assert config != before or start.deepspeed is not None
        config = replace(config, performance=replace(config.performance, grad_accum_dtype=config.performance.sums))
        assert config_changes(as_json(before), as_json(config), start.allow_change) == {}, flag


def test_half_a_micro_batch_divides_the_batch() -> None:
    for micro, half in ((2, 1), (3, 1), (9, 3), (12, 6), (35, 7)):
        [first, *_] = remedies(replace(SETUP, micro=micro), activations=8 * GIB, room=100 * GIB)
        assert first[0] == f"--batch.micro {half}"
        assert BatchConfig(samples=micro * 4, micro=half).accumulation(4) == micro // half


def test_a_smaller_micro_batch_holds_whole_pairs() -> None:
    """A contrastive loss has terms of both samples of a pair."""
    for micro, half in ((12, "--batch.micro 6"), (6, "--batch.micro 2"), (2, "--performance.recompute")):
        [first, *_] = remedies(replace(SETUP, micro=micro, together=2), activations=8 * GIB, room=100 * GIB)
        assert first[0] == half
    for given, _ in remedies(replace(SETUP, micro=12, together=2), activations=8 * GIB, room=0):
        assert "--batch.micro 1" not in given


def test_frozen_parameters_are_counted_as_they_are_cast_and_buffers_as_they_are() -> None:
    module = nn.Linear(8, 4).requires_grad_(False)
    module.register_buffer("packed", torch.zeros(100, dtype=torch.uint8))
    module.register_buffer("table", torch.zeros(10))
    module.register_buffer("count", torch.zeros((), dtype=torch.int64))
    assert (frozen_bytes(module, "bf16"), frozen_bytes(module, "fp32")) == (36 * 2, 36 * 4)
    assert buffer_bytes(module) == 100 + 40 + 8


def test_the_first_pass_is_explained_too(world: World, digits: Path, tmp_path: Path) -> None:
    class Failing(DeepSpeedEngine):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._engine.module.register_forward_pre_hook(lambda *_: self._fail())

        def _fail(self) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")

    message = r"out of memory in the first forward and backward pass on cpu.*Predicted to fit: --.*CUDA out of memory"
    with (
        mock.patch("fastdiff.training.engines.deepspeed.DeepSpeedEngine", Failing),
        pytest.raises(NoMemoryError, match=message),
    ):
        train(tiny(digits, tmp_path / "run", batch__micro=1), launch(1), world)


def on_gpu(config: RunConfig = RUN, *, device: str = "none") -> TrainState:
    """As much of the state of a run on a GPU as an error of host memory needs."""
    state = SimpleNamespace(
        config=config,
        engine=SimpleNamespace(ds_config={"zero_optimization": {"stage": 3, "offload_optimizer": {"device": device}}}),
        world=SimpleNamespace(device=torch.device("cuda")),
        heartbeat=SimpleNamespace(phase="data"),
    )
    return state  # type: ignore[return-value]


def ending(error: Exception, state: TrainState) -> Exception:
    """The error with which a rank ends."""
    with pytest.raises((FastdiffError, type(error))) as ended, explaining_memory(state):
        raise error
    return ended.value


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_host_memory_of_a_run_on_a_gpu_has_its_own_remedies(error: Exception) -> None:
    found = ending(error, on_gpu())
    assert isinstance(found, NoMemoryError)
    wanted = "out of host memory in data: lower --data.prefetch or --output.pinned_gib or start fewer ranks per node. "
    assert str(found).startswith(wanted)
    given = ["--preset", "digits", "--data.prefetch", "1", "--output.pinned_gib", "0"]
    assert config_changes(as_json(RUN), as_json(train_flags.parse(given)[1]), ()) == {}


def test_workers_and_offload_are_named_where_the_run_has_them() -> None:
    online = replace(RUN, data=replace(RUN.data, online=True), pretrained=PretrainedConfig(path="sd", weights=True))
    [found, other] = [str(ending(MemoryError(), state)) for state in (on_gpu(online), on_gpu(device="cpu"))]
    assert "lower --data.workers or --data.prefetch or --output.pinned_gib or start" in found
    assert "per node or do not offload the optimizer. The" in other
    assert config_changes(as_json(online), as_json(replace(online, data=replace(online.data, workers=1))), ()) == {}


def test_other_errors_are_not_explained_by_memory() -> None:
    for error in (ValueError("out of memory"), RuntimeError("CUDA error: an illegal memory access was encountered")):
        assert ending(error, on_gpu()) is error
    told = StorageError("no host memory for a copy")
    told.__context__ = MemoryError()
    assert ending(told, on_gpu()) is told


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "gpu"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "gpu"),
        (torch.AcceleratorError("CUDA error: out of memory"), "gpu"),
        (torch.OutOfMemoryError("CUDA out of memory"), "gpu"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"), "host"),
    ],
)
def test_whose_memory_ran_out(error: Exception, expected: str) -> None:
    assert exhausted(error) == expected


def test_the_room_on_a_gpu_is_what_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"memory_reserved": 10, "memory_allocated": 7, "mem_get_info": (5, 24)}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    assert _cache_and_room(torch.device("cuda"), 1) == (3, 15)


def test_pinned_memory_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, bool]] = []
    allocate = staging._allocate
    monkeypatch.setattr(staging, "_BLOCK", 64)
    monkeypatch.setattr(staging, "_allocate", lambda *how: asked.append(how) or allocate(*how))
    for gib, pinned in ((0.0, 0), (100 / GIB, 1), (1.0, 4)):
        asked.clear()
        HostCopy(gib)._make_room(200, pinned=True)
        assert asked == [(64, pinned > 0), (64, pinned > 1), (64, pinned > 1), (8, pinned > 0)]
    with pytest.raises(ConfigError, match=r"--output.pinned_gib -1: at least 0"):
        OutputConfig(pinned_gib=-1)
