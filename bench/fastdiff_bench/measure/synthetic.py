"""Synthetic latents, classes, text embeddings and features of a teacher in the shapes of a model."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from fastdiff.conditions import FEATURES, MASKS, image_conditions, of_source
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.data.encoding.builtin import encode_synthetic, pixels_template, synthetic, versions
from fastdiff.data.shards.format import LATENT, Column, DatasetInfo, Normalisation, Provenance, condition_columns
from fastdiff.data.shards.reader import Arrays
from fastdiff.data.shards.writer import ShardWriter

_SCALE = 0.18215
"""Scale factor of Stable Diffusion's latents."""
_SHARD = 256


def write(folder: Path, model: ModelConfig, samples: int, *, seed: int = 0) -> Path:
    """Write a data set for a model and return its folder.

    A text-conditional network gets posteriors (mean and deviation) with the embeddings of a caption of full length
    each, in 16 bits, as ``fastdiff encode`` stores them; another one gets normal latents with random classes, and, if
    it is aligned, features in int8.
    """
    if model.text_conditional:
        _write_captioned(folder, model, samples, seed)
    elif model.aligned_shape:
        _write_aligned(folder, model, samples, seed)
    else:
        shape = (model.channels, model.size, model.size)
        encode_synthetic(folder, shape, samples, max(1, model.classes), seed=seed, samples_per_shard=_SHARD)
    return folder


def _write_aligned(folder: Path, model: ModelConfig, samples: int, seed: int) -> None:
    shape, classes, width = (model.channels, model.size, model.size), max(1, model.classes), model.aligned_width
    provenance = Provenance(source=f"synthetic, seed {seed}", transform="none", versions=versions())
    template = pixels_template(shape, classes, provenance)
    template = replace(
        template,
        columns=template.columns | condition_columns({FEATURES: model.aligned_shape}, "float16"),
        normalisations={FEATURES: Normalisation(shift=(0.0,) * width, scale=(1.0,) * width)},
    )
    generator = np.random.default_rng(seed)
    with ShardWriter(folder, template, samples_per_shard=_SHARD) as writer:
        for sample in synthetic(shape, samples, classes, seed):
            features = generator.integers(-127, 128, model.aligned_shape, np.int8)
            writer.add(sample.key, {LATENT: sample.latent, FEATURES: features}, sample.label)


def _write_captioned(folder: Path, model: ModelConfig, samples: int, seed: int) -> None:
    channels = model.channels
    text = {name: model.conditions[name] for name in of_source("caption", model.conditions)}
    square = 8 * model.size, 8 * model.size
    of_image = image_conditions(model.conditions, square, (0, 0), square)
    columns = {"latent": Column(dtype="float16", shape=(2 * channels, model.size, model.size))}
    columns |= condition_columns(text, "float16", of_image)
    template = DatasetInfo(
        columns=columns,
        normalisation=Normalisation(shift=(0.0,) * 2 * channels, scale=(_SCALE,) * 2 * channels),
        provenance=Provenance(source=f"synthetic, seed {seed}", transform="none", versions=versions()),
        kind="posterior",
    )
    masks = {name: np.ones(shape, np.uint8) for name, shape in text.items() if name in MASKS}
    text = {name: shape for name, shape in text.items() if name not in MASKS}
    null = {name: np.zeros(shape, np.float16) for name, shape in text.items()} | masks
    sizes = {name: np.array(values, np.float32) for name, values in of_image.items()}
    generator = np.random.default_rng(seed)
    with ShardWriter(folder, template, samples_per_shard=_SHARD, null=null) as writer:
        for number in range(samples):
            latent = generator.standard_normal((2 * channels, model.size, model.size), np.float32)
            latent[channels:] = 0.1
            arrays: Arrays = {"latent": (latent / _SCALE).astype(np.float16), **sizes, **masks}
            arrays |= {n: generator.standard_normal(shape, np.float32).astype(np.float16) for n, shape in text.items()}
            writer.add(f"{number:09d}", arrays)
