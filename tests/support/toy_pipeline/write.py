"""Writes the toy pipeline, as diffusers lays it out."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from toy_pipeline.autoencoder import CHANNELS
from toy_pipeline.network import ToyTextConfig, ToyTransformer
from toy_pipeline.text_encoder import WIDTH, WORDS

_SCHEDULER = {
    "_class_name": "DDIMScheduler",
    "num_train_timesteps": 1000,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "prediction_type": "epsilon",
}


def write_pipeline(folder: Path) -> Path:
    """Write a pipeline with random weights and return its folder, which is created."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        network = ToyTransformer(ToyTextConfig(), recompute=False)
    rotation, _ = torch.linalg.qr(torch.randn(CHANNELS, CHANNELS, generator=generator))
    vae = {"rotation": rotation, "mean": torch.linspace(-1, 1, CHANNELS), "std": torch.linspace(0.5, 2, CHANNELS)}
    table = torch.randn(WORDS + 1, WIDTH, generator=generator)
    _part(folder / "vae", "ToyAutoencoder", {}, vae)
    _part(folder / "text_encoder", "ToyTextModel", {}, {"table": table}, "model.safetensors")
    _part(folder / "transformer", "ToyTransformer", network.config.to_diffusers(), network.state_dict())
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(_SCHEDULER))
    classes = {"vae": "ToyAutoencoder", "text_encoder": "ToyTextModel", "transformer": "ToyTransformer"}
    index: dict[str, Any] = {part: ["toy_pipeline", name] for part, name in classes.items()}
    index |= {"_class_name": "ToyPipeline", "scheduler": ["diffusers", "DDIMScheduler"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def _part(
    folder: Path,
    kind: str,
    config: dict[str, Any],
    weights: dict[str, Tensor],
    name: str = "diffusion_pytorch_model.safetensors",
) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"_class_name": kind, **config}))
    save_file({key: value.contiguous() for key, value in weights.items()}, folder / name)
