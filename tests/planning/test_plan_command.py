"""``fastdiff plan``: what it prints, that it allocates nothing, and bad input."""

import json
import re
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from PIL import Image

from fastdiff.cli.main import main
from fastdiff.config import deepspeed as deepspeed_config
from fastdiff.config.command_line.train_flags import parse
from fastdiff.config.launch_options import Launch
from fastdiff.config.presets import preset
from fastdiff.durations import in_words
from fastdiff.models.cost.flops import run_flops
from fastdiff.planning import gpus
from fastdiff.planning.calibration import ASSUMED
from fastdiff.planning.network import Network, read_network
from fastdiff.planning.options import OF_STAGE, Planned, distinct, json_of, memory_of, options, setup_for
from fastdiff.planning.scaling.zero import Zero
from fastdiff.planning.table import command, rows
from tests.planning.test_memory import resident

DIT = ("--preset", "dit-xl-2-256")


def plan(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert main(["plan", *argv]) == code
    found = capsys.readouterr()
    return found.out if code == 0 else found.err


def test_the_table_says_what_fits_why_others_fall_out_and_how_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    """And allocates nothing: the network has 2.7 GB of weights, and as much of gradients."""
    plan(capsys, "--preset", "digits", "--gpus", "1xH100")
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    said = plan(capsys, *DIT, "--gpus", "8xH100", "1xT4", "8xV100", "--price", "2.5", "--seed", "3")
    assert resident("VmHWM") - before < 300e6
    lines = said.splitlines()
    assert "674.8 M parameters, 712 GFLOP per image, bf16, 102,400,000 samples in 400,000 steps of 256" in lines[0]
    assert lines[2].split()[-3:] == ["time", "kWh", "price"]
    assert lines[3].startswith("8xH100")
    assert "1xT4: has no bf16, has fp32, fp16; change --performance.precision bf16" in said
    assert "8xV100: has no bf16" in said
    start = shlex.split(next(line for line in lines if line.startswith("  fastdiff train")))
    assert start[:4] == ["fastdiff", "train", "--ranks", "8"]
    launch, config = parse(start[4:])
    assert (config.seed, config.batch.micro) == (3, 32)
    deepspeed_config.resolve(launch.deepspeed, config, 8)


def test_json_has_the_same_options(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(plan(capsys, "--preset", "digits", "--gpus", "2x8xH100", "--json"))
    first = found["options"][0]
    assert (first["gpus"], first["ranks"]) == ("2x8xH100", 16)
    assert "launch slurm --nodes 2 --ranks-per-node 8 -- --preset digits" in found["command"]
    assert "price" not in first
    assert first["time"] == in_words(86_400 * first["days"]["middle"])
    for name in ("images_per_s", "step_s", "days"):
        low, middle, high = first[name].values()
        assert low <= middle <= high
    parts = first["memory_gib"]
    held = sum(parts[name] for name in ("weights", "masters", "moments", "averages", "gradients", "buffers"))
    assert held < first["peak_gib"] < first["room_gib"]


def test_the_hours_of_the_authors_stand_beside_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """80 H800-hours are 284 images/s and GPU; at 712 GFLOP per image that is 20.5 % of 989 TFLOP/s."""
    recipe = ("--preset", "lightningdit-xl-1-256", "--data.path", "", "--gpus", "8xH100")
    fast = ("--batch.micro", "128", "--deepspeed_config", "ddp", "--optim.name", "adamw8bit")
    said = plan(capsys, *recipe, *fast)
    assert "reported: 80 H800-hours for 81,920,000 samples, MFU 20.5%\n  README of " in said
    found = json.loads(plan(capsys, *recipe, *fast, "--json"))
    (report,), (first, *_) = found["reported"], found["options"]
    assert (report["gpu"], report["gpu_hours"], report["mfu"]) == ("H800", 80, pytest.approx(0.2045, abs=1e-3))
    assert first["gpu_hours"] == pytest.approx(8 * 24 * first["days"]["middle"])
    rate = first["images_per_s"]["middle"] / 8
    assert first["mfu"] == pytest.approx(found["network"]["flops_per_image"] * rate / 989.4e12)
    assert f"planned: {first['gpu_hours']:.3g} H100-hours for 81,920,000 samples, MFU {first['mfu']:.1%}\n" in said
    assert {one["optimizer"] for one in json.loads(plan(capsys, *recipe, *fast[:4], "--json"))["options"]} == {"adamw"}
    other = json.loads(plan(capsys, *recipe, *fast, "--model.depth", "2", "--json"))
    assert other["reported"] == [], "of another network"
    said = plan(capsys, "--preset", "sit-xl-2-256", "--data.path", "", "--gpus", "8xH100", *fast[2:])
    assert "reported: no hours of its authors are known here\nplanned: " in said


def test_a_login_that_is_missing_is_told_beside_the_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "https://me:hunter2@wandb.example/x")
    assert main(["plan", "--preset", "digits", "--gpus", "1xH100", "--json", "--output.report_to", "wandb"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["options"]
    assert "warning: --output.report_to wandb: no API key for wandb.example: " in said.err
    assert "hunter2" not in said.err


@pytest.mark.nightly
def test_a_lora_is_counted_apart_from_the_weights_that_it_is_added_to(capsys: pytest.CaptureFixture[str]) -> None:
    """Masters, moments and gradients are the adapter's; also on several ranks."""
    few = ("--preset", "sd15-lora", "--performance.recompute", "--batch.micro", "1")
    found = json.loads(plan(capsys, *few, "--gpus", "8xH100", "--json"))
    trained, frozen = 3_188_736, 859_520_964
    assert found["network"] == {
        "kind": "unet", "trained": trained, "frozen": frozen, "flops_per_image": run_flops(preset("sd15-lora")),
        "flops_per_update": 0,
    }  # fmt: skip
    assert {option["optimizer"] for option in found["options"]} == {"adamw"}
    memory = found["options"][0]["memory_gib"]
    assert memory["masters"] == pytest.approx(4 * trained / 2**30)
    assert memory["moments"] == pytest.approx(8 * trained / 2**30)
    assert memory["weights"] == pytest.approx(2 * (trained + frozen) / 2**30)
    assert memory["validation"] == pytest.approx(memory["weights"]), "the whole network draws the images of prompts"


def test_a_lora_is_told_in_the_heading_and_smaller_if_quantised(capsys: pytest.CaptureFixture[str]) -> None:
    start = ("--lora.rank", "16", "--pretrained.path", "base.pt", "--pretrained.weights")
    few = ("--preset", "dit-s-8-256", *start, "--batch.micro", "1", "--performance.recompute", "--gpus", "1xH100")
    packed = ("--lora.quantize", "4bit")
    told = plan(capsys, *few, *packed).splitlines()[0]
    assert "LoRA of rank 16, alpha 16, 0.44 M trained and 33.1 M frozen parameters, its large matrices in 4bit" in told
    sizes = [json.loads(plan(capsys, *few, *more, "--json"))["options"][0]["memory_gib"] for more in ((), packed)]
    assert sizes[1]["weights"] < 0.8 * sizes[0]["weights"]
    trained = 442_368
    assert sizes[0]["masters"] == pytest.approx(4 * trained / 2**30)
    assert sizes[0]["moments"] == pytest.approx(8 * trained / 2**30)


def test_what_the_command_line_fixes_is_not_varied(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "zero2.json"
    file.write_text(json.dumps(OF_STAGE[2]))
    fixed = ("--batch.micro", "4", "--deepspeed_config", str(file), "--performance.recompute")
    found = json.loads(plan(capsys, "--preset", "dit-s-8-256", *fixed, "--gpus", "8xH100", "--json"))
    assert {(o["zero_stage"], o["micro"], o["recompute"], o["stored_blocks"]) for o in found["options"]} == {
        (2, 4, True, 12)
    }, "all twelve blocks have room"
    start = f"--deepspeed_config {file} --performance.recompute --batch.micro 4"
    assert found["command"].endswith(f"{start} --performance.stored_blocks 12")
    for stored in (0, 5):
        both = (*fixed, "--performance.stored-blocks", str(stored))
        found = json.loads(plan(capsys, "--preset", "dit-s-8-256", *both, "--gpus", "8xH100", "--json"))
        assert {option["stored_blocks"] for option in found["options"]} == {stored}
        assert found["command"].count("stored") == 1


def planned(*argv: str, gib: float) -> tuple[list[Planned], Network, Launch]:
    """The options of a run on one GPU of this memory."""
    launch, config = parse(argv)
    network = read_network(config, torch.device("cuda"), varies=True)
    (gpu,) = [gpu for gpu in gpus.known() if gpu.name == "H100"]
    small = gpus.Gpus(replace(gpu, memory_gib=gib), 1, 1)
    return options(config, launch, network, small, ASSUMED)[0], network, launch


def test_as_many_blocks_keep_their_activations_as_fit() -> None:
    """One more does not fit; each one makes the passes faster; and the command has them."""
    fixed = ("--preset", "dit-s-8-256", "--data.path", "", "--batch.micro", "256", "--optim.name", "adamw8bit")
    found = []
    for gib in (3.6, 3.75, 3.9):
        [most], network, launch = planned(*fixed, "--performance.recompute", gib=gib)
        stored = most.option.stored_blocks
        assert 0 < stored < network.blocks == most.option.blocks == 12
        assert most.fits
        raw = json_of(0, launch)
        more = replace(most.config, performance=replace(most.config.performance, stored_blocks=stored + 1))
        held = memory_of(more, setup_for(more, raw, network, 1), network, bucket=Zero.of(raw).reduce_bucket)
        assert held.peak > most.room
        assert command(most, launch).endswith(f"--deepspeed_config ddp --performance.stored_blocks {stored}")
        _, started = parse(shlex.split(command(most, launch))[4:])
        assert started.performance == most.config.performance
        assert f"{12 - stored} of 12" in list(rows([most], 1, None))[1]
        assert most.time is not None
        found.append((stored, -most.time.passes))
    everything, _, _ = planned(*fixed, gib=80)
    assert [one.option.recompute for one in distinct(everything)] == [False]
    assert everything[0].time is not None
    found.append((12, -everything[0].time.passes))
    assert [stored for stored, _ in found] == sorted({stored for stored, _ in found}), "more memory stores more blocks"
    assert found == sorted(found)
    assert found[0][1] / found[-1][1] == pytest.approx(1 + 10 / 12 / 3, rel=0.02), "two of twelve, against none"


def test_micro_batches_hold_whole_pairs_of_a_contrastive_loss(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 258 samples a half, which is odd, has room."""
    run = (
        "--preset", "dit-s-8-256", "--data.path", "", "--objective.process", "flow", "--objective.prediction", "flow",
        "--steps", "1000", "--optim.name", "adamw8bit",
    )  # fmt: skip
    pairs = (*run, "--objective.contrastive-weight", "0.05")
    for flags, expected in ((run, 129), (pairs, 86)):
        found, _, _ = planned(*flags, "--batch.samples", "258", gib=4)
        assert {one.option.micro for one in found if not one.option.recompute} == {expected}
    for flags, reason in (
        (("--batch.samples", "257"), "--batch.samples 257 is not divisible by 1 ranks x 2 samples"),
        (("--batch.samples", "258", "--batch.micro", "3"), "--batch.micro 3 is no multiple of 2, the samples that"),
    ):
        assert reason in plan(capsys, *pairs, *flags, "--gpus", "1xH100")


@pytest.mark.parametrize("given", [("--optim.name", "muon"), ("--optim.name=muon",)])
def test_the_command_names_one_optimizer(given: tuple[str, ...]) -> None:
    found, _, launch = planned("--preset", "dit-s-8-256", "--data.path", "", *given, gib=80)
    named = [
        [after for word, after in pairwise(shlex.split(command(one, launch))) if word.startswith("--optim.name")]
        for one in found
    ]
    assert named == [[one.option.optimizer] for one in found]
    assert {one.option.optimizer for one in found} == {"muon", "muon-bf16"}


def test_graphs_are_planned_for_the_engine_that_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (("--performance.cuda_graph",), ("--performance.engine", "flat")):
        found = json.loads(plan(capsys, *DIT, *flags, "--gpus", "8xH100", "--json"))
        assert {option["zero_stage"] for option in found["options"]} == {0}
        assert not found["not_possible"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            ("--performance.cuda_graph", "--deepspeed_config", "zero1"),
            "--performance.cuda_graph needs the flat engine, .* none with ZeRO stage 1: .*; use --deepspeed_config ddp",
        ),
        (
            ("--performance.cuda_graph", "--performance.precision", "fp16"),
            "--performance.cuda_graph needs the flat engine, .* none with --performance.precision fp16: .* use bf16",
        ),
        (
            ("--performance.cuda_graph", "--optim.name", "adamw8bit-bnb"),
            "--performance.cuda_graph needs .* none with --optim.name adamw8bit-bnb: use adamw",
        ),
        (
            ("--performance.engine", "flat", "--deepspeed_config", "zero2"),
            "--performance.engine flat with ZeRO stage 2: .*; use --deepspeed_config ddp",
        ),
        (
            ("--performance.precision", "fp16", "--deepspeed_config", "ddp"),
            "fp16 with ZeRO stage 0: .*; use --deepspeed_config zero1",
        ),
    ],
)
def test_what_no_engine_can_train_is_not_predicted(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], reason: str
) -> None:
    """With the reason that a start would give."""
    found = json.loads(plan(capsys, "--preset", "digits", *flags, "--gpus", "8xH100", "--json"))
    assert found["options"] == []
    (refused,) = found["not_possible"]
    assert re.search(reason, refused["reason"])
    said = plan(capsys, "--preset", "digits", *flags, "--gpus", "8xH100")
    assert said.splitlines()[-1] == "no option is possible; change what the reasons name"


def test_a_gpu_that_is_too_small_is_said_to_be(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "gpus.toml"
    file.write_text(
        'gpu = [{names = ["tiny"], memory_gib = 4, bandwidth = 100, tflops = {bf16 = 10}, link = 8, per_node = 2, '
        'network = 1, watts = 50, source = "none"}]'
    )
    said = plan(capsys, "--preset", "dit-b-8-256", "--gpus", "2xtiny", "--gpu-file", str(file))
    assert "2xtiny: 16 options need more than the 1.0 GiB of a rank, at least " in said
    assert "no option fits" in said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--gpus", "8xH10O"), "--gpus 8xH10O: no GPU is called H10O; did you mean H100"),
        (("--gpus", "0xH100"), "0 GPUs, expected from 1 to"),
        (("--gpus", "12xH100"), "12 fill no whole nodes of 8; write NODESxGPUSxH100, for example 2x8xH100"),
        (("--gpu-file", "/nowhere.toml"), "--gpu-file /nowhere.toml: not a readable file"),
        (("--from", "/nowhere"), "--from /nowhere: FileNotFoundError"),
    ],
)
def test_bad_input_is_explained(given: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in plan(capsys, "--preset", "digits", *given, code=2)


ENTRY = """[[gpu]]
names = ["x"]
memory_gib = 4
bandwidth = 100
tflops = { bf16 = 10 }
link = 8
per_node = 2
network = 1
watts = 50
source = "none"
"""


def test_a_wrong_entry_of_a_file_is_explained(tmp_path: Path) -> None:
    for text, message in (
        ("", "no \\[\\[gpu\\]\\]"),
        ("[[gpu]]\nnames=['x']", "lacks bandwidth"),
        ("[[gpu", "not TOML"),
        ("gpu = [3]", "no \\[\\[gpu\\]\\]"),
        (ENTRY.replace("{ bf16 = 10 }", "10"), "expected names, and every figure above 0"),
        (ENTRY.replace("watts = 50", "watts = [50]"), "expected names, and every figure above 0"),
        (f"{ENTRY}multiprocessors = {{ count = 1 }}", "multiprocessors of the GPU \\['x'\\] lacks capability, clock"),
        (f"{ENTRY}multiprocessors = 3", "multiprocessors of the GPU \\['x'\\] is 3, expected a table"),
    ):
        (tmp_path / "gpus.toml").write_text(text)
        with pytest.raises(gpus.ConfigError, match=message):
            gpus.read(tmp_path / "gpus.toml")


def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(capsys, "--preset", "digits", "--gpus", "1xH100", "2x4090", "--picture", str(tmp_path / "memory.png"))
    with Image.open(tmp_path / "memory.png") as found:
        assert min(found.size) > 200


def test_the_table_of_gpus_is_sound() -> None:
    names = [part.lower() for gpu in gpus.known() for part in gpu.names]
    assert len(names) == len(set(names))
    for gpu in gpus.known():
        assert gpu.source
        assert gpus.of_device(f"NVIDIA {gpu.names[-1]}") is gpu
    for reported, name in (
        ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 PCIe", "H100 PCIe"), ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA GeForce RTX 4090", "4090"), ("NVIDIA L40S", "L40S"),
        ("Tesla V100-SXM2-16GB", "V100-16"), ("NVIDIA L4", "L4"), ("NVIDIA GH200 480GB", "GH200"),
    ):  # fmt: skip
        found = gpus.of_device(reported)
        assert found is not None
        assert found.name == name
    assert gpus.of_device("cpu") is gpus.of_device("NVIDIA L40") is None
    assert [gpu.peak for gpu in map(gpus.of_device, ("NVIDIA GeForce RTX 4090", "Tesla T4")) if gpu] == [
        165.2e12,
        65e12,
    ]
