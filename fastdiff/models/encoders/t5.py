"""T5's encoder in PixArt: every token, in lower case, with a mask (Chen et al. 2023, arXiv:2310.00426)."""

from dataclasses import replace
from functools import partial
from typing import Any

from fastdiff.models.encoders.family import TextEncoderFamily
from fastdiff.models.encoders.language_model import Reading, load


def stripped(tokenizer: Any, caption: str) -> str:
    """Return a caption in lower case, without spaces at its ends."""
    return caption.lower().strip()


_ALPHA = Reading(tokens=120, text=stripped)
_SIGMA = replace(_ALPHA, tokens=300)


def _family(pipelines: tuple[str, ...], reading: Reading) -> TextEncoderFamily:
    return TextEncoderFamily(
        classes=("T5EncoderModel",),
        pipelines=pipelines,
        tokens=reading.tokens,
        conditions=("context", "context_mask"),
        load=partial(load, reading=reading),
    )


PIXART_ALPHA = _family(("PixArtAlphaPipeline",), _ALPHA)
PIXART_SIGMA = _family(("PixArtSigmaPipeline",), _SIGMA)
