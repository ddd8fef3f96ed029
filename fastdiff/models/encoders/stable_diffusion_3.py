"""The text encoders of Stable Diffusion 3, two of CLIP and T5 (Esser et al. 2024, arXiv:2403.03206, section 4)."""

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.models.encoders.clip import Clip, load_clip
from fastdiff.models.encoders.family import TextEncoderFamily
from fastdiff.models.encoders.language_model import LanguageModel, Reading, load
from fastdiff.models.pipeline_files import PipelineFiles

_CLIPS, _T5 = ("text_encoder", "text_encoder_2"), "text_encoder_3"
_READING = Reading(tokens=256, attends_padding=True, masked=False)
_CLIP_TOKENS = 77


class ThreeEncoders:
    """CLIP's tokens, whose channels are joined and padded to the width of T5, and then T5's tokens, without a mask.

    Args:
        clips: two encoders with a pooled embedding each.
        t5: reads without a mask.
    """

    def __init__(self, clips: Clip, t5: LanguageModel) -> None:
        self._clips, self._t5 = clips, t5

    def parameters(self) -> Iterator[Tensor]:
        """Yield the weights of all encoders."""
        return chain(self._clips.parameters(), self._t5.parameters())

    def __call__(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return ``context [N, 77 + L, D]`` and ``pooled [N, P]``, the pooled embeddings of both CLIPs joined."""
        found, tokens = self._clips(captions), self._t5(captions)["context"]
        widened = F.pad(found["context"], (0, tokens.shape[-1] - found["context"].shape[-1]))
        return found | {"context": torch.cat([widened, tokens], dim=1)}

    def lost(self, captions: Sequence[str]) -> dict[int, int]:
        """Return the tokens of these captions that CLIP, and those that T5, does not read; see ``CaptionTokens``."""
        return self._clips.lost(captions) | self._t5.lost(captions)

    def null(self) -> dict[str, Tensor]:
        """Return the conditions of the empty caption."""
        return {name: value[0] for name, value in self([""]).items()}


def _load(pipeline: PipelineFiles, device: torch.device | str, dtype: torch.dtype) -> ThreeEncoders:
    clips = load_clip(pipeline, device, dtype, parts=_CLIPS, pooled=(0, 1))
    return ThreeEncoders(clips, load(pipeline, device, dtype, _READING, part=_T5))


THREE_ENCODERS = TextEncoderFamily(
    classes=("CLIPTextModelWithProjection", "CLIPTextModelWithProjection", "T5EncoderModel"),
    pipelines=("StableDiffusion3Pipeline",),
    tokens=_READING.tokens,
    fixed_tokens=_CLIP_TOKENS,
    conditions=("context", "pooled"),
    load=_load,
)
