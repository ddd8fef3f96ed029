"""A text encoder with captions of variable length: one embedding per word, and one for the end."""

import zlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fastdiff.models.encoders.family import TextEncoderFamily
from fastdiff.models.pipeline_files import PipelineFiles

WORDS, TOKENS, WIDTH = 64, 6, 8
_END = WORDS


class ToyText:
    """Words to rows of a table.

    Args:
        table: ``[65, 8]`` embeddings, the last one of the end.
    """

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def parameters(self) -> Iterator[Tensor]:
        """Yield its weights."""
        yield self._table

    def __call__(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return ``context [N, 6, 8]``, padded with zeros, and ``context_mask [N, 6]`` bool."""
        context = self._table.new_zeros(len(captions), TOKENS, WIDTH)
        mask = torch.zeros(len(captions), TOKENS, dtype=torch.bool, device=context.device)
        for row, caption in enumerate(captions):
            tokens = [zlib.crc32(word.encode()) % WORDS for word in caption.split()[: TOKENS - 1]] + [_END]
            context[row, : len(tokens)] = self._table[tokens]
            mask[row, : len(tokens)] = True
        return {"context": context, "context_mask": mask}

    def cut(self, captions: Sequence[str]) -> int | None:
        """Return the limit, if a caption has more tokens."""
        return TOKENS if any(len(caption.split()) >= TOKENS for caption in captions) else None

    def null(self) -> dict[str, Tensor]:
        """Return the conditions of the empty caption."""
        return {name: value[0] for name, value in self([""]).items()}


def _load(pipeline: PipelineFiles, device: torch.device | str, dtype: torch.dtype) -> ToyText:
    return ToyText(pipeline.weights("text_encoder")["table"].to(device, dtype))


TOY_TEXT = TextEncoderFamily(classes=("ToyTextModel",), conditions=("context", "context_mask"), load=_load)
