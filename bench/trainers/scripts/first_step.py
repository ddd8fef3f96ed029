"""diffusers' examples/text_to_image scripts from their first import to their first optimizer step, as a program.

``python bench/trainers/scripts/first_step.py {t2i,t2i-lora} FILE FLAGS...`` takes the scripts' own flags, as far as
``bench startup`` gives them, and writes FILE after the step. It imports what the published files import (argparse,
accelerate, datasets, diffusers, huggingface_hub, torch, tqdm, transformers, with the adapter also peft), except
torchvision, whose transforms are computed here with Pillow; that favours the scripts. Models, optimizer, schedule, data
and tracker are built with the same calls. Nothing of fastdiff is imported.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

import accelerate  # type: ignore[import-untyped,unused-ignore]
import datasets
import diffusers
import huggingface_hub  # noqa: F401
import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
import transformers
from accelerate.logging import get_logger  # type: ignore[import-untyped,unused-ignore]
from accelerate.utils import ProjectConfiguration, set_seed  # type: ignore[import-untyped,unused-ignore]
from datasets import load_dataset
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel  # noqa: F401
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel, cast_training_params, compute_snr  # noqa: F401
from PIL import Image
from torch import Tensor
from tqdm.auto import tqdm
from transformers import CLIPTextModel, CLIPTokenizer

logger: Any = get_logger(__name__, log_level="INFO")


def _flags(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("script", choices=["t2i", "t2i-lora"])
    parser.add_argument("mark", type=Path, help="file to write after the first step")
    for name in ("--pretrained_model_name_or_path", "--train_data_dir", "--output_dir"):
        parser.add_argument(name, required=True)
    for name in ("--resolution", "--train_batch_size", "--max_train_steps", "--seed", "--rank"):
        parser.add_argument(name, type=int, default=4)
    parser.add_argument("--use_ema", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Take one step."""
    args = _flags(argv)
    accelerator = accelerate.Accelerator(
        log_with="tensorboard",
        project_config=ProjectConfiguration(project_dir=args.output_dir, logging_dir=f"{args.output_dir}/logs"),
    )
    logging.basicConfig(level=logging.INFO)
    datasets.utils.logging.set_verbosity_warning()
    transformers.utils.logging.set_verbosity_warning()
    diffusers.utils.logging.set_verbosity_info()
    set_seed(args.seed)
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    _Script(args, accelerator).step()
    args.mark.touch()
    accelerator.end_training()


class _Script:
    def __init__(self, args: argparse.Namespace, accelerator: Any) -> None:
        self._args, self._accelerator = args, accelerator
        folder = args.pretrained_model_name_or_path
        self._scheduler: Any = DDPMScheduler.from_pretrained(folder, subfolder="scheduler")
        tokenizer: Any = CLIPTokenizer.from_pretrained(folder, subfolder="tokenizer")
        self._text: Any = CLIPTextModel.from_pretrained(folder, subfolder="text_encoder")
        self._vae: Any = AutoencoderKL.from_pretrained(folder, subfolder="vae")
        unet: Any = UNet2DConditionModel.from_pretrained(folder, subfolder="unet")
        self._text.requires_grad_(False)
        self._vae.requires_grad_(False)
        if args.script == "t2i-lora":
            _add_adapter(unet, args.rank)
        self._ema = self._average(folder) if args.use_ema else None
        trained = [parameter for parameter in unet.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.999), weight_decay=1e-2, eps=1e-8)
        loader = _loader(args, tokenizer, accelerator)
        schedule = get_scheduler("constant", optimizer=optimizer, num_training_steps=args.max_train_steps)
        self._unet, self._optimizer, self._loader, self._schedule = accelerator.prepare(
            unet.train(), optimizer, loader, schedule
        )
        accelerator.init_trackers("text2image-fine-tune", config={"resolution": args.resolution})

    @staticmethod
    def _average(folder: str) -> Any:
        unet: Any = UNet2DConditionModel.from_pretrained(folder, subfolder="unet")
        return EMAModel(unet.parameters(), model_cls=UNet2DConditionModel, model_config=unet.config)

    def step(self) -> None:
        """Take the first step."""
        bar = tqdm(range(self._args.max_train_steps), desc="Steps")
        batch = next(iter(self._loader))
        with self._accelerator.accumulate(self._unet):
            loss = self._loss(batch["pixel_values"], batch["input_ids"])
            shown = self._accelerator.gather(loss.repeat(self._args.train_batch_size)).mean().item()
            self._accelerator.backward(loss)
            self._accelerator.clip_grad_norm_(self._unet.parameters(), 1.0)
            self._optimizer.step()
            self._schedule.step()
            self._optimizer.zero_grad()
        if self._ema is not None:
            self._ema.step(self._unet.parameters())
        bar.update(1)
        self._accelerator.log({"train_loss": shown}, step=1)

    def _loss(self, pixels: Tensor, tokens: Tensor) -> Tensor:
        latents = self._vae.encode(pixels).latent_dist.sample() * self._vae.config.scaling_factor
        noise = torch.randn_like(latents)
        time = torch.randint(0, self._scheduler.config.num_train_timesteps, (len(latents),)).long()
        context = self._text(tokens, return_dict=False)[0]
        noisy = self._scheduler.add_noise(latents, noise, time)
        return F.mse_loss(self._unet(noisy, time, context, return_dict=False)[0].float(), noise.float())


def _add_adapter(unet: Any, rank: int) -> None:
    from peft import LoraConfig  # type: ignore[import-untyped,unused-ignore]

    unet.requires_grad_(False)
    targets = ["to_k", "to_q", "to_v", "to_out.0"]
    unet.add_adapter(LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=targets))


def _loader(args: argparse.Namespace, tokenizer: Any, accelerator: Any) -> torch.utils.data.DataLoader[Any]:
    def transformed(image: Image.Image) -> Tensor:
        side = args.resolution
        scale = side / min(image.size)
        image = image.convert("RGB").resize([max(side, int(n * scale)) for n in image.size])  # type: ignore[arg-type]
        pixels = torch.from_numpy(np.array(image.crop((0, 0, side, side)))).permute(2, 0, 1)
        return pixels.float().div(255.0).sub(0.5).div(0.5)

    def preprocess(rows: dict[str, Any]) -> dict[str, Any]:
        tokens = tokenizer(
            rows["text"], max_length=tokenizer.model_max_length, padding="max_length", truncation=True,
            return_tensors="pt",
        )  # fmt: skip
        return {"pixel_values": [transformed(image) for image in rows["image"]], "input_ids": tokens.input_ids}

    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.stack([row[name] for row in rows]) for name in ("pixel_values", "input_ids")}

    found = load_dataset("imagefolder", data_dir=args.train_data_dir, cache_dir=f"{args.output_dir}/cache")
    with accelerator.main_process_first():
        rows: Any = found["train"].with_transform(preprocess)
    return torch.utils.data.DataLoader(rows, args.train_batch_size, shuffle=True, collate_fn=collate)


if __name__ == "__main__":
    main(sys.argv[1:])
