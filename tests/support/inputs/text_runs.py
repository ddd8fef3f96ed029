"""Small runs of the tiny UNet on captioned latents."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastdiff.conditions import image_conditions
from fastdiff.config.networks.pretrained import PretrainedConfig
from fastdiff.config.optimizers.adamw import AdamWConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.config.sections.data import DataConfig, ValidationConfig
from fastdiff.config.sections.ema import EmaConfig
from fastdiff.config.sections.objective import DdpmConfig
from fastdiff.config.sections.output import OutputConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.data.shards.format import Column, DatasetInfo, Normalisation, Provenance, condition_columns
from fastdiff.data.shards.writer import ShardWriter
from fastdiff.models.pretrained.pipeline import Pretrained
from fastdiff.models.pretrained.tiny_pipeline import IMAGE_SIZE, UNETS, Kind

CAPTIONS = ("a red cat", "a blue dog", "two birds", "")
SCALE = 0.18215


def encode(folder: Path, pipeline: Path, count: int = 32, *, captioned: bool = False) -> Path:
    """Random posteriors of the size of the tiny UNet with the embeddings of real captions, or these, too."""
    made_by = Pretrained(str(pipeline))
    encoder = made_by.text()
    embedded = {name: value.to(torch.float16).numpy() for name, value in encoder(CAPTIONS).items()}
    null = {name: value.to(torch.float16).numpy() for name, value in encoder.null().items()}
    square = IMAGE_SIZE, IMAGE_SIZE
    of_image = image_conditions(made_by.network_config().conditions, square, (0, 0), square)
    sizes = {name: np.array(values, np.float32) for name, values in of_image.items()}
    columns = {"latent": Column(dtype="float16", shape=(8, 8, 8))}
    columns |= condition_columns({name: value.shape for name, value in null.items()}, "float16", sizes)
    template = DatasetInfo(
        columns=columns,
        normalisation=Normalisation(shift=(0.0,) * 8, scale=(SCALE,) * 8),
        provenance=Provenance(
            source="test",
            transform="none",
            autoencoder_digest=made_by.digest("vae"),
            text_encoder_digest=made_by.digest("text_encoder"),
        ),
        kind="posterior",
    )
    generator = np.random.default_rng(0)
    with ShardWriter(folder, template, samples_per_shard=8, null=null) as writer:
        for number in range(count):
            latent = generator.standard_normal((8, 8, 8))
            latent[4:] = 0.1
            arrays: dict[str, Any] = {"latent": (latent / SCALE).astype(np.float16)}
            arrays |= {name: value[number % len(CAPTIONS)] for name, value in embedded.items()}
            arrays |= sizes
            caption = CAPTIONS[number % len(CAPTIONS)]
            writer.add(f"{number:09d}", arrays, meta={"captions": [caption]} if captioned else None)
    return folder


def text_run(
    data: Path, pipeline: Path, folder: Path, steps: int = 2, kind: Kind = "sd15", **changes: Any
) -> RunConfig:
    """The tiny UNet, fine-tuned; ``changes`` replace fields of the parts by dotted name."""
    config = RunConfig(
        samples=steps * 8,
        model=UNETS[kind],
        pretrained=PretrainedConfig(path=str(pipeline), weights=True),
        objective=DdpmConfig(schedule="scaled_linear", prediction="auto"),
        data=DataConfig(path=str(data), loader="prefetch"),
        batch=BatchConfig(samples=8),
        optim=AdamWConfig(lr=1e-3),
        ema=EmaConfig(rates=(0.9, 0.5)),
        performance=PerformanceConfig(precision="fp32"),
        validation=ValidationConfig(),
        output=OutputConfig(folder=str(folder), log_every=1, checkpoint_every=0, sample_every=0),
    )
    for name, value in changes.items():
        part, _, field = name.partition("__")
        config = replace(config, **{part: replace(getattr(config, part), **{field: value}) if field else value})
    return config
