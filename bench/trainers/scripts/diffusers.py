"""diffusers' examples/text_to_image/train_text_to_image.py and train_text_to_image_lora.py, on the tiny pipeline.

As published: images are decoded, captions tokenised, and both encoded in every step, in the training process; the
optimizer, the average and the clipping have torch's and diffusers' defaults. One device, fp32.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from bench.measure.session import StepTimer
from fastdiff.config.networks.pretrained import CAPTION_TOKENS


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
    script = _Script(pipeline, rank)
    batches = script.accelerator.prepare(_loader(images, side, batch, script.tokenizer))
    timer.ready()
    for loaded in _endless(batches):
        script.step(loaded["pixel_values"], loaded["input_ids"])
        timer.after_step()


class _Script:
    def __init__(self, pipeline: Path, rank: int) -> None:
        from accelerate import Accelerator  # type: ignore[import-untyped,unused-ignore]
        from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
        from diffusers.optimization import get_scheduler
        from transformers import CLIPTextModel, CLIPTokenizer

        self.accelerator: Any = Accelerator(cpu=True, mixed_precision="no", gradient_accumulation_steps=1)
        self.tokenizer = CLIPTokenizer.from_pretrained(pipeline, subfolder="tokenizer")
        self._scheduler: Any = DDPMScheduler.from_pretrained(pipeline, subfolder="scheduler")
        frozen: list[Any] = [
            AutoencoderKL.from_pretrained(pipeline, subfolder="vae"),
            CLIPTextModel.from_pretrained(pipeline, subfolder="text_encoder"),
        ]
        self._vae, self._text = (part.requires_grad_(False) for part in frozen)
        unet: Any = UNet2DConditionModel.from_pretrained(pipeline, subfolder="unet")
        self._ema = None if rank else _average(unet)
        trained = _with_adapter(unet, rank) if rank else list(unet.parameters())
        # The LoRA script's list of parameters is empty when it clips, because the optimizer has taken its iterator.
        self._clipped: list[nn.Parameter] = [] if rank else trained
        optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.999), weight_decay=1e-2, eps=1e-8)
        schedule = get_scheduler("constant", optimizer=optimizer)
        self._unet, self._optimizer, self._schedule = self.accelerator.prepare(unet.train(), optimizer, schedule)
        self._bar = tqdm(desc="Steps")

    def step(self, pixels: Tensor, tokens: Tensor) -> None:
        with self.accelerator.accumulate(self._unet):
            latents = self._vae.encode(pixels).latent_dist.sample() * self._vae.config.scaling_factor
            noise = torch.randn_like(latents)
            time = torch.randint(0, self._scheduler.config.num_train_timesteps, (len(latents),)).long()
            noisy = self._scheduler.add_noise(latents, noise, time)
            context = self._text(tokens, return_dict=False)[0]
            prediction = self._unet(noisy, time, context, return_dict=False)[0]
            loss = F.mse_loss(prediction.float(), noise.float(), reduction="mean")
            shown = self.accelerator.gather(loss.repeat(len(latents))).mean().item()
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self._clipped, 1.0)
            self._optimizer.step()
            self._schedule.step()
            self._optimizer.zero_grad()
        if self._ema is not None:
            self._ema.step(self._unet.parameters())
        self._bar.update(1)
        self.accelerator.log({"train_loss": shown})
        self._bar.set_postfix(step_loss=loss.detach().item(), lr=self._schedule.get_last_lr()[0])


def _average(unet: Any) -> Any:
    from diffusers import UNet2DConditionModel
    from diffusers.training_utils import EMAModel

    return EMAModel(unet.parameters(), model_cls=UNet2DConditionModel, model_config=unet.config)


def _with_adapter(unet: Any, rank: int) -> list[nn.Parameter]:
    from peft import LoraConfig  # type: ignore[import-untyped,unused-ignore]

    unet.requires_grad_(False)
    targets = ["to_k", "to_q", "to_v", "to_out.0"]
    unet.add_adapter(LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=targets))
    return [p for p in unet.parameters() if p.requires_grad]


class _Images(Dataset[dict[str, Tensor]]):
    """Images with the pixels of torchvision's transforms in the scripts, and their tokenised captions."""

    def __init__(self, folder: Path, side: int, tokenizer: Any) -> None:
        rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
        self._rows = [(folder / row["file_name"], row["text"]) for row in rows]
        self._side, self._tokenizer = side, tokenizer

    def __len__(self) -> int:
        return len(self._rows)

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Tensor]]:
        rows = [self._rows[number] for number in numbers]
        tokens = self._tokenizer(
            [text for _, text in rows],
            max_length=CAPTION_TOKENS,
            padding="max_length",
            truncation=True,
            return_tensors="pt",
        )
        return [
            {"pixel_values": self._transformed(path), "input_ids": ids}
            for (path, _), ids in zip(rows, tokens.input_ids, strict=True)
        ]

    def _transformed(self, path: Path) -> Tensor:
        image = Image.open(path).convert("RGB")
        scale = self._side / min(image.size)
        width, height = (max(self._side, int(pixels * scale)) for pixels in image.size)
        image = image.resize((width, height), Image.Resampling.LANCZOS)
        left, top = (int(torch.randint(n - self._side + 1, ())) for n in (width, height))
        image = image.crop((left, top, left + self._side, top + self._side))
        if torch.rand(()) < 0.5:
            image = ImageOps.mirror(image)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        return pixels.float().div(255.0).sub_(0.5).div_(0.5)


def _loader(folder: Path, side: int, batch: int, tokenizer: Any) -> DataLoader[Any]:
    def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        pixels = torch.stack([sample["pixel_values"] for sample in samples])
        pixels = pixels.to(memory_format=torch.contiguous_format).float()
        return {"pixel_values": pixels, "input_ids": torch.stack([sample["input_ids"] for sample in samples])}

    return DataLoader(_Images(folder, side, tokenizer), batch, shuffle=True, collate_fn=collate, num_workers=0)


def _endless(loader: Any) -> Iterator[dict[str, Tensor]]:
    while True:
        yield from loader
