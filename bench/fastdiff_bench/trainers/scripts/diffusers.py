"""diffusers' examples/text_to_image/train_text_to_image.py and train_text_to_image_lora.py, on the tiny pipeline.

As published: images are decoded, captions tokenised, and both encoded in every step, in the training process; the
optimizer, the average and the clipping have torch's and diffusers' defaults. One device, fp32. torchvision's transforms
are computed here with Pillow. The module imports no other of the repository, so that ``first_step`` starts as a script
without fastdiff does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

if TYPE_CHECKING:
    from fastdiff_bench.measure.session import StepTimer

RANK = 4
"""Of the adapter."""
_STEPS = str(1_000_000)
"""Length of the run, in steps; no benchmark reaches it."""


def flags(case: str, pipeline: Path, images: Path, side: int, batch: int) -> list[str]:
    """Return flags that a script accepts.

    Args:
        case: ``t2i`` or ``t2i-lora``.
        pipeline: folder of the pipeline.
        images: folder of images with ``metadata.jsonl``.
        side: of the square training images, in pixels.
        batch: images of a step.
    """
    return [
        "--pretrained_model_name_or_path", str(pipeline), "--train_data_dir", str(images), "--random_flip",
        "--resolution", str(side), "--train_batch_size", str(batch), "--max_train_steps", _STEPS,
        "--checkpointing_steps", _STEPS, "--seed", "0", *(["--use_ema"] if case == "t2i" else ["--rank", str(RANK)]),
    ]  # fmt: skip


def run(timer: StepTimer, pipeline: Path, images: Path, side: int, batch: int, rank: int) -> None:
    """Step until ``Enough``.

    Args:
        timer: of this process.
        pipeline: folder of the pipeline.
        images: folder of images with ``metadata.jsonl``.
        side: of the square training images, in pixels.
        batch: images of a step.
        rank: of the adapter; 0: the whole UNet is trained, and averaged.
    """
    from accelerate import Accelerator  # type: ignore[import-untyped,unused-ignore]

    accelerator: Any = Accelerator(cpu=True, mixed_precision="no", gradient_accumulation_steps=1)
    script = Script(accelerator, pipeline, rank, averaged=not rank)
    batches = endless(accelerator.prepare(loader(images, side, batch, script.tokenizer)))
    timer.ready()
    for loaded in batches:
        script.step(loaded)
        timer.after_step()


class Script:
    """Models, optimizer and schedule of a script, and its step.

    Args:
        accelerator: accelerate's.
        pipeline: folder of the pipeline.
        rank: of the adapter; 0: the whole UNet is trained.
        averaged: whether an average of the UNet is kept.
    """

    def __init__(self, accelerator: Any, pipeline: Path, rank: int, *, averaged: bool) -> None:
        from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
        from diffusers.optimization import get_scheduler
        from transformers import CLIPTextModel, CLIPTokenizer

        self._accelerator = accelerator
        self._scheduler: Any = DDPMScheduler.from_pretrained(pipeline, subfolder="scheduler")
        self.tokenizer: Any = CLIPTokenizer.from_pretrained(pipeline, subfolder="tokenizer")
        self._text: Any = CLIPTextModel.from_pretrained(pipeline, subfolder="text_encoder")
        self._vae: Any = AutoencoderKL.from_pretrained(pipeline, subfolder="vae")
        unet: Any = UNet2DConditionModel.from_pretrained(pipeline, subfolder="unet")
        self._text.requires_grad_(False)
        self._vae.requires_grad_(False)
        self._ema = _average(pipeline) if averaged else None
        trained = _with_adapter(unet, rank) if rank else list(unet.parameters())
        # The LoRA script's list of parameters is empty when it clips, because the optimizer has taken its iterator.
        self._clipped: list[nn.Parameter] = [] if rank else trained
        optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.999), weight_decay=1e-2, eps=1e-8)
        schedule = get_scheduler("constant", optimizer=optimizer)
        self._unet, self._optimizer, self._schedule = accelerator.prepare(unet.train(), optimizer, schedule)
        self._bar = tqdm(desc="Steps")

    def step(self, batch: dict[str, Tensor]) -> None:
        """Take a step with ``pixel_values [B, 3, side, side]`` fp32 and ``input_ids [B, 77]`` int64."""
        with self._accelerator.accumulate(self._unet):
            loss = self._loss(batch["pixel_values"], batch["input_ids"])
            shown = self._accelerator.gather(loss.repeat(len(batch["input_ids"]))).mean().item()
            self._accelerator.backward(loss)
            self._accelerator.clip_grad_norm_(self._clipped, 1.0)
            self._optimizer.step()
            self._schedule.step()
            self._optimizer.zero_grad()
        if self._ema is not None:
            self._ema.step(self._unet.parameters())
        self._bar.update(1)
        self._accelerator.log({"train_loss": shown}, step=self._bar.n)
        self._bar.set_postfix(step_loss=loss.detach().item(), lr=self._schedule.get_last_lr()[0])

    def _loss(self, pixels: Tensor, tokens: Tensor) -> Tensor:
        latents = self._vae.encode(pixels).latent_dist.sample() * self._vae.config.scaling_factor
        noise = torch.randn_like(latents)
        time = torch.randint(0, self._scheduler.config.num_train_timesteps, (len(latents),)).long()
        noisy = self._scheduler.add_noise(latents, noise, time)
        context = self._text(tokens, return_dict=False)[0]
        prediction = self._unet(noisy, time, context, return_dict=False)[0]
        return F.mse_loss(prediction.float(), noise.float(), reduction="mean")


def _average(pipeline: Path) -> Any:
    from diffusers import UNet2DConditionModel
    from diffusers.training_utils import EMAModel

    unet: Any = UNet2DConditionModel.from_pretrained(pipeline, subfolder="unet")
    return EMAModel(unet.parameters(), model_cls=UNet2DConditionModel, model_config=unet.config)


def _with_adapter(unet: Any, rank: int) -> list[nn.Parameter]:
    from peft import LoraConfig  # type: ignore[import-untyped,unused-ignore]

    unet.requires_grad_(False)
    targets = ["to_k", "to_q", "to_v", "to_out.0"]
    unet.add_adapter(LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=targets))
    return [p for p in unet.parameters() if p.requires_grad]


def transformed(image: Image.Image, side: int) -> Tensor:
    """Return the pixels ``[3, side, side]`` in [-1, 1] of an image that is resized, cropped and mirrored at random."""
    image = image.convert("RGB")
    scale = side / min(image.size)
    width, height = (max(side, int(pixels * scale)) for pixels in image.size)
    image = image.resize((width, height), Image.Resampling.LANCZOS)
    left, top = (int(torch.randint(n - side + 1, ())) for n in (width, height))
    image = image.crop((left, top, left + side, top + side))
    if torch.rand(()) < 0.5:
        image = ImageOps.mirror(image)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
    return pixels.float().div(255.0).sub_(0.5).div_(0.5)


def tokenized(tokenizer: Any, captions: Sequence[str]) -> Tensor:
    """Return tokens ``[B, 77]`` int64."""
    length = tokenizer.model_max_length
    found = tokenizer(list(captions), max_length=length, padding="max_length", truncation=True, return_tensors="pt")
    ids: Tensor = found.input_ids
    return ids


def collate(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the samples as one batch; see ``Script.step``."""
    pixels = torch.stack([sample["pixel_values"] for sample in samples])
    pixels = pixels.to(memory_format=torch.contiguous_format).float()
    return {"pixel_values": pixels, "input_ids": torch.stack([sample["input_ids"] for sample in samples])}


def loader(images: Path, side: int, batch: int, tokenizer: Any) -> DataLoader[Any]:
    """Return the batches of a folder of images with ``metadata.jsonl``, without workers; see ``Script.step``."""
    return DataLoader(_Images(images, side, tokenizer), batch, shuffle=True, collate_fn=collate, drop_last=True)


class _Images(Dataset[dict[str, Tensor]]):
    """Images and their captions as a script's samples, without the library ``datasets``."""

    def __init__(self, folder: Path, side: int, tokenizer: Any) -> None:
        rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
        self._rows = [(folder / row["file_name"], row["text"]) for row in rows]
        self._side, self._tokenizer = side, tokenizer

    def __len__(self) -> int:
        return len(self._rows)

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Tensor]]:
        rows = [self._rows[number] for number in numbers]
        tokens = tokenized(self._tokenizer, [text for _, text in rows])
        return [
            {"pixel_values": transformed(Image.open(path), self._side), "input_ids": ids}
            for (path, _), ids in zip(rows, tokens, strict=True)
        ]


def endless(loader: Any) -> Iterator[dict[str, Tensor]]:
    """Yield batches, epoch after epoch."""
    while True:
        yield from loader
