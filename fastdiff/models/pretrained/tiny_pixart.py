"""Complete but tiny PixArt pipeline with random weights, for tests and the demo.

It has every part of a real pipeline (tokenizer, T5 encoder, autoencoder, transformer, scheduler) in the layout of
diffusers. Images are four times as wide as their latents.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from fastdiff.config.networks.pixart import PixArtConfig
from fastdiff.models.pretrained import tiny_pipeline

Kind = Literal["alpha", "sigma"]

_WIDTH = 32
_SPACE = "\u2581"
_SHAPE: dict[str, Any] = {"depth": 2, "hidden": 48, "heads": 4, "caption_dim": _WIDTH, "learn_sigma": True}
PIXARTS: dict[Kind, PixArtConfig] = {
    "alpha": PixArtConfig(**_SHAPE, size=128, patch=8, pe_interpolation=2.0, size_conditioning=True),
    "sigma": PixArtConfig(**_SHAPE, size=32, patch=4, pe_interpolation=0.5),
}
"""Configurations of the transformers. diffusers' pipeline of alpha gives sizes to those of size 128 alone."""
PIPELINES: dict[Kind, str] = {"alpha": "PixArtAlphaPipeline", "sigma": "PixArtSigmaPipeline"}


def build(
    folder: Path,
    *,
    kind: Kind = "sigma",
    model: PixArtConfig | None = None,
    words: Sequence[str] = (),
    text_scale: float = 1.0,
    seed: int = 0,
) -> Path:
    """Write a pipeline and return its folder.

    Args:
        folder: created if it is missing.
        kind: of pipeline.
        model: shape of the transformer; None: that of ``PIXARTS``.
        words: in lower case, a token each. All others are read character by character.
        text_scale: root mean square of the embeddings of tokens.
        seed: seed of every weight; the global random state is restored.
    """
    import diffusers

    folder.mkdir(parents=True, exist_ok=True)
    model = model or PIXARTS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        pipeline = getattr(diffusers, PIPELINES[kind])(
            tokenizer=_tokenizer(words),
            text_encoder=_text_encoder(model.caption_dim, len(_vocabulary(words)), text_scale),
            vae=tiny_pipeline.autoencoder(diffusers),
            transformer=diffusers.PixArtTransformer2DModel(**model.to_diffusers()),
            scheduler=diffusers.DDIMScheduler(
                beta_schedule="linear", clip_sample=False, set_alpha_to_one=True, timestep_spacing="trailing"
            ),
        )
    pipeline.save_pretrained(folder)
    return folder


def _text_encoder(width: int, vocabulary: int, scale: float) -> Any:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=8,
        d_ff=2 * width,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        initializer_factor=1.0,
    )
    encoder = T5EncoderModel(config)
    torch.nn.init.constant_(encoder.encoder.final_layer_norm.weight, scale)
    return encoder


def _tokenizer(words: Sequence[str]) -> Any:
    """Return T5's tokenizer with a vocabulary without training; a longer piece is preferred."""
    from transformers import T5Tokenizer

    return T5Tokenizer(vocab=[(piece, len(piece) - 1.0) for piece in _vocabulary(words)], extra_ids=0)


def _vocabulary(words: Sequence[str]) -> list[str]:
    return ["<pad>", "</s>", "<unk>", _SPACE, *map(chr, range(33, 127)), *(f"{_SPACE}{word}" for word in words)]
