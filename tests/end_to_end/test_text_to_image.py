"""A complete text-to-image run, from shards to a pipeline of diffusers."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastdiff.config.sections.data import ValidationConfig
from fastdiff.export.run import Choice, export
from fastdiff.models.pretrained.tiny_pipeline import IMAGE_SIZE, build
from tests.support.inputs.text_runs import encode, text_run, train_on_rank
from tests.support.processes import run_ranks
from tests.support.runs import intact, launch, newest, records

PROMPTS = ("a red cat", "a blue dog", "two birds")


def test_zero3_ema_recompute_checkpoint_images_and_export(tmp_path: Path) -> None:
    from diffusers import StableDiffusionPipeline

    pipeline = build(tmp_path / "pipeline")
    data = encode(tmp_path / "data", pipeline)
    run, out = tmp_path / "run", tmp_path / "out"
    prompts = ValidationConfig(prompts=PROMPTS, every=2, images_per_prompt=2, steps=3)
    config = text_run(
        data,
        pipeline,
        run,
        steps=3,
        performance__recompute=True,
        validation=prompts,
        output__checkpoint_every=2,
    )
    run_ranks(train_on_rank, config, launch(3), ranks=2)

    assert [record["step"] for record in records(run)] == [1, 2, 3]
    assert intact(run) == [3, 2]
    saved = newest(run)
    assert (saved.manifest["zero_stage"], saved.manifest["world_size"]) == (3, 2)

    pictures = sorted(path.name for path in (run / "samples").iterdir())
    assert pictures == ["step-00000002.png", "step-00000003.png"]
    picture = np.asarray(Image.open(run / "samples" / pictures[-1]))
    assert picture.shape == (2 * (2 * IMAGE_SIZE + 2) + 2, 3 * (2 * IMAGE_SIZE + 2) + 2, 3), "two rows, three columns"
    assert picture.std() > 1
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0}).Reload()
    shown = {f"validation/{prompt}" for prompt in PROMPTS}
    assert set(events.Tags()["images"]) == shown | {"loss/by log SNR, over the steps"}
    shown = events.Images("validation/a red cat")
    assert [(image.step, image.width) for image in shown] == [(2, 2 * IMAGE_SIZE), (3, 2 * IMAGE_SIZE)], (
        "concurrent stages"
    )

    export(run, out, Choice(format="diffusers"))
    exported = load_file(out / "unet" / "diffusion_pytorch_model.safetensors")
    average, trained = saved.weights(0.9), saved.weights()
    assert exported.keys() == average.keys()
    assert all(torch.equal(exported[name], average[name]) for name in average)
    assert any(not torch.equal(exported[name], trained[name]) for name in average)
    assert (out / "samples.png").read_bytes() == (run / "samples" / pictures[-1]).read_bytes()
    loaded = StableDiffusionPipeline.from_pretrained(out)
    loaded.set_progress_bar_config(disable=True)
    state = loaded.unet.state_dict()
    assert all(torch.equal(state[name], average[name]) for name in average)
    image = np.asarray(loaded("a red cat", num_inference_steps=3, output_type="pil").images[0])
    assert image.shape == (IMAGE_SIZE, IMAGE_SIZE, 3)
    assert image.std() > 1
