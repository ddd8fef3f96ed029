"""diffusers' examples/text_to_image scripts from their first import to their first optimizer step, as a program.

``python -m fastdiff_bench.trainers.scripts.first_step {t2i,t2i-lora} FILE FLAGS...`` takes the scripts' own flags, as
far as ``diffusers.flags`` gives them, and writes FILE after the step. It imports what the published files do (argparse,
accelerate, datasets, diffusers, huggingface_hub, torch, tqdm, transformers, with the adapter also peft), except
torchvision, with transforms by Pillow; that favours the scripts. Nothing of fastdiff is imported.
"""

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

import accelerate  # type: ignore[import-untyped,unused-ignore]
import datasets
import diffusers
import huggingface_hub  # noqa: F401
import torch
import torch.utils.checkpoint
import transformers
from accelerate.logging import get_logger  # type: ignore[import-untyped,unused-ignore]
from accelerate.utils import ProjectConfiguration, set_seed  # type: ignore[import-untyped,unused-ignore]
from datasets import load_dataset
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel  # noqa: F401
from diffusers.optimization import get_scheduler  # noqa: F401
from diffusers.training_utils import EMAModel, cast_training_params, compute_snr  # noqa: F401
from transformers import CLIPTextModel, CLIPTokenizer  # noqa: F401

from fastdiff_bench.trainers.scripts.diffusers import Script, collate, tokenized, transformed

logger: Any = get_logger(__name__, log_level="INFO")


def _flags(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("script", choices=["t2i", "t2i-lora"])
    parser.add_argument("mark", type=Path, help="file to write after the first step")
    for name in ("--pretrained_model_name_or_path", "--train_data_dir", "--output_dir"):
        parser.add_argument(name, required=True)
    for name in ("--resolution", "--train_batch_size", "--max_train_steps", "--checkpointing_steps", "--seed"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--random_flip", action="store_true", required=True)
    parser.add_argument("--rank", type=int, default=4)
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
    rank = args.rank if args.script == "t2i-lora" else 0
    script = Script(accelerator, Path(args.pretrained_model_name_or_path), rank, averaged=args.use_ema)
    batches = accelerator.prepare(_loader(args, script.tokenizer, accelerator))
    accelerator.init_trackers("text2image-fine-tune", config={"resolution": args.resolution})
    script.step(next(iter(batches)))
    args.mark.touch()
    accelerator.end_training()


def _loader(args: argparse.Namespace, tokenizer: Any, accelerator: Any) -> torch.utils.data.DataLoader[Any]:
    def preprocess(rows: dict[str, Any]) -> dict[str, Any]:
        pixels = [transformed(image, args.resolution) for image in rows["image"]]
        return {"pixel_values": pixels, "input_ids": tokenized(tokenizer, rows["text"])}

    found = load_dataset("imagefolder", data_dir=args.train_data_dir, cache_dir=f"{args.output_dir}/cache")
    with accelerator.main_process_first():
        rows: Any = found["train"].with_transform(preprocess)
    return torch.utils.data.DataLoader(rows, args.train_batch_size, shuffle=True, collate_fn=collate)


if __name__ == "__main__":
    main(sys.argv[1:])
