"""What diffusers' own tests of its text-to-image scripts ask of a run holds for the printed commands.

examples/text_to_image/test_text_to_image.py and test_text_to_image_lora.py, on stand-ins of this machine.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fastdiff.cli.compat.run import translate
from fastdiff.models.pretrained.tiny_pipeline import IMAGE_SIZE, build
from tests.support.inputs.images import encode, natural
from tests.support.runs import newest
from tests.support.scripts import COMMAND, run_with_forks

STEP = [
    "--resolution", "32", "--center_crop", "--random_flip", "--train_batch_size", "1",
    "--gradient_accumulation_steps", "1", "--learning_rate", "5.0e-04", "--scale_lr", "--lr_scheduler", "constant",
    "--lr_warmup_steps", "0",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline and captioned images."""
    folder = tmp_path_factory.mktemp("given")
    build(folder / "pipeline")
    (folder / "images").mkdir()
    rows = [{"file_name": f"{number}.png", "text": f"picture {number}"} for number in range(4)]
    for row in rows:
        (folder / "images" / row["file_name"]).write_bytes(encode(natural(40, 50), "PNG"))
    (folder / "images" / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def obey(script: str, place: Path, run: Path, *flags: str) -> Path:
    """Run the commands for these flags, and return the folder of the export."""
    given = ["--pretrained_model_name_or_path", str(place / "pipeline"), "--train_data_dir", str(place / "images")]
    commands = translate(script, [*given, *STEP, "--output_dir", str(run), *flags], gpus=1).commands
    for command in commands:
        done = run_with_forks(COMMAND, *command[1:], cwd=place)
        assert done.code == 0, done.output
    return Path(commands[-1][3])


def kept(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*[0-9]"))


def drawn(pipeline: Any) -> tuple[int, int]:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline("a prompt", num_inference_steps=1).images[0].size  # type: ignore[no-any-return]


def pipeline_of(folder: Path) -> Any:
    from diffusers import DiffusionPipeline

    return DiffusionPipeline.from_pretrained(folder, safety_checker=None)


@pytest.mark.nightly
def test_an_adapter_is_resumed_with_fewer_checkpoints_and_exported_again(place: Path, tmp_path: Path) -> None:
    """test_text_to_image_lora_checkpointing_checkpoints_total_limit_removes_multiple_checkpoints."""
    run, more = tmp_path / "run", ("--checkpointing_steps=2", "--seed=0", "--num_validation_images=0")
    out = obey("t2i-lora", place, run, "--max_train_steps", "4", *more)
    assert kept(run) == [2, 4]
    first = load_file(out / "pytorch_lora_weights.safetensors")
    assert all(name.startswith("unet.") and "lora" in name for name in first)
    resumed = ("--resume_from_checkpoint=checkpoint-4", "--checkpoints_total_limit=2")
    assert obey("t2i-lora", place, run, "--max_train_steps", "8", *more, *resumed) == out
    assert kept(run) == [6, 8]
    last = load_file(out / "pytorch_lora_weights.safetensors")
    assert last.keys() == first.keys()
    assert any(not torch.equal(value, first[name]) for name, value in last.items()), "the export is that of step 8"
    assert "picture 0" not in (out / "README.md").read_text(), "a caption of the data is not published"
    pipeline = pipeline_of(place / "pipeline")
    pipeline.load_lora_weights(out)
    assert drawn(pipeline) == (IMAGE_SIZE, IMAGE_SIZE)


@pytest.mark.nightly
def test_an_adapter_keeps_as_many_checkpoints_as_it_may(place: Path, tmp_path: Path) -> None:
    """test_text_to_image_lora_checkpointing_checkpoints_total_limit."""
    flags = ("--max_train_steps", "6", "--checkpointing_steps=2", "--checkpoints_total_limit=2", "--seed=0")
    out = obey("t2i-lora", place, tmp_path / "run", *flags, "--num_validation_images=0")
    assert kept(tmp_path / "run") == [4, 6]
    pipeline = pipeline_of(place / "pipeline")
    pipeline.load_lora_weights(out)
    assert drawn(pipeline) == (IMAGE_SIZE, IMAGE_SIZE)


@pytest.mark.nightly
@pytest.mark.parametrize("average", [(), ("--use_ema",)], ids=["raw", "ema"])
def test_a_pipeline_is_that_of_the_last_step(place: Path, tmp_path: Path, average: tuple[str, ...]) -> None:
    """test_text_to_image_checkpointing, with and without _use_ema: the final weights are those of the average."""
    from diffusers import UNet2DConditionModel

    run, more = tmp_path / "run", ("--seed=0", *average)
    out = obey("t2i", place, run, "--max_train_steps", "4", "--checkpointing_steps=2", *more)
    assert (out / "unet" / "diffusion_pytorch_model.safetensors").is_file()
    assert (out / "scheduler" / "scheduler_config.json").is_file()
    assert kept(run) == [2, 4]
    assert drawn(pipeline_of(out)) == (IMAGE_SIZE, IMAGE_SIZE)
    before = run_with_forks(COMMAND, "export", run, tmp_path / "step-2", "--format", "diffusers", "--step", "2")
    assert before.code == 0, before.output
    unet = UNet2DConditionModel.from_pretrained(tmp_path / "step-2", subfolder="unet")
    pipeline = pipeline_of(place / "pipeline")
    pipeline.unet = unet
    assert drawn(pipeline) == (IMAGE_SIZE, IMAGE_SIZE), "that of a step between"

    resumed = ("--checkpointing_steps=1", "--resume_from_checkpoint=checkpoint-4")
    assert obey("t2i", place, run, "--max_train_steps", "5", *resumed, *more) == out
    assert kept(run)[-1] == 5
    pipeline = pipeline_of(out)
    assert drawn(pipeline) == (IMAGE_SIZE, IMAGE_SIZE)
    saved = newest(run)
    expected = saved.weights(0.9999) if average else saved.weights()
    assert all(torch.equal(value, expected[name]) for name, value in pipeline.unet.state_dict().items())
    if average:
        raw = saved.weights()
        assert any(not torch.equal(value, raw[name]) for name, value in expected.items())


@pytest.mark.nightly
def test_a_resume_to_fewer_steps_than_were_taken_ends_well(place: Path, tmp_path: Path) -> None:
    """test_text_to_image_checkpointing resumes a run of 4 steps with --max_train_steps 2; theirs takes one more."""
    run = tmp_path / "run"
    obey("t2i", place, run, "--max_train_steps", "4", "--checkpointing_steps=2", "--seed=0")
    resumed = ("--checkpointing_steps=1", "--resume_from_checkpoint=checkpoint-4", "--seed=0")
    out = obey("t2i", place, run, "--max_train_steps", "2", *resumed)
    assert kept(run)[-1] == 4
    assert drawn(pipeline_of(out)) == (IMAGE_SIZE, IMAGE_SIZE)
