"""CLIP's text encoders: one in Stable Diffusion 1.x and 2.x, two in Stable Diffusion XL."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastdiff.errors import ConfigError
from fastdiff.models.encoders.family import TextEncoderFamily
from fastdiff.models.pipeline_files import PipelineFiles, readable


class Clip:
    """One or two of CLIP's text encoders: captions to embeddings, as in the pipelines of diffusers.

    Args:
        tokenizers: one per encoder.
        encoders: CLIP text models; with two, as in SDXL, the penultimate layers are concatenated and the second encoder
            gives the pooled embedding (Podell et al. 2023, arXiv:2307.01952, section 2).
        device: device of the encoders.
        null_is_zero: whether "no caption" is a tensor of zeros (SDXL) and not the embedding of the empty caption.
        pooled: numbers of the encoders, if there are two, whose pooled embeddings are joined; SDXL: the second.
    """

    def __init__(
        self,
        tokenizers: Sequence[Any],
        encoders: Sequence[Any],
        device: torch.device,
        *,
        null_is_zero: bool = False,
        pooled: Sequence[int] = (1,),
    ) -> None:
        self._tokenizers, self._encoders, self._device = tokenizers, encoders, device
        self._null_is_zero, self._pooled = null_is_zero, pooled

    def parameters(self) -> Iterator[Tensor]:
        """Yield the weights of all encoders."""
        for encoder in self._encoders:
            yield from encoder.parameters()

    @torch.no_grad()
    def __call__(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return ``context [N, L, D]`` and, with two encoders, ``pooled [N, P]``, in the encoders' dtype.

        All L positions are kept, padding after the last token included: the UNet attends to the padding and its values
        depend on the caption, so a trimmed embedding would change the training.
        """
        outputs = [
            encoder(self._tokens(tokenizer, captions), output_hidden_states=True)
            for tokenizer, encoder in zip(self._tokenizers, self._encoders, strict=True)
        ]
        if len(outputs) == 1:
            return {"context": outputs[0].last_hidden_state}
        return {
            "context": torch.cat([output.hidden_states[-2] for output in outputs], dim=-1),
            "pooled": torch.cat([outputs[number].text_embeds for number in self._pooled], dim=-1),
        }

    def lost(self, captions: Sequence[str]) -> dict[int, int]:
        """Return the tokens of these captions that are not read, by the number that is read; see ``CaptionTokens``."""
        lost: dict[int, int] = {}
        for tokenizer in self._tokenizers:
            limit = int(tokenizer.model_max_length)
            # A token has at least one byte, and two mark the ends: most captions need not be tokenized.
            long = [caption for caption in captions if len(caption.encode()) + 2 > limit]
            lengths = [len(tokenizer(caption, verbose=False)["input_ids"]) for caption in long]
            if more := sum(max(0, length - limit) for length in lengths):
                lost[limit] = max(more, lost.get(limit, 0))
        return lost

    def null(self) -> dict[str, Tensor]:
        """Return the null condition of classifier-free guidance, ``context [L, D]`` and ``pooled [P]``."""
        empty = {name: value[0] for name, value in self([""]).items()}
        return {name: torch.zeros_like(value) for name, value in empty.items()} if self._null_is_zero else empty

    def _tokens(self, tokenizer: Any, captions: Sequence[str]) -> Tensor:
        tokens: Mapping[str, Tensor] = tokenizer(
            list(captions),
            padding="max_length",
            max_length=tokenizer.model_max_length,
            truncation=True,
            return_tensors="pt",
        )
        return tokens["input_ids"].to(self._device)


def load_clip(
    pipeline: PipelineFiles,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    parts: Sequence[str] = (),
    pooled: Sequence[int] = (1,),
) -> Clip:
    """Load the text encoders of CLIP of a pipeline: those of ``parts``, otherwise all of its text encoders."""
    import transformers

    encoders, tokenizers = [], []
    for part in parts or pipeline.text_parts:
        config = pipeline.json(f"{part}/config.json")
        if (found := config.get("model_type")) != "clip_text_model":
            folder = pipeline.folder_of(part)
            raise ConfigError(f"{folder / 'config.json'} has model_type {found}, expected clip_text_model: CLIP's text")
        kind = getattr(transformers, pipeline.class_of(part))
        encoders.append(pipeline.load_part(kind, part, device, dtype))
        length = encoders[-1].config.max_position_embeddings
        tokenizers.append(_tokenizer(pipeline, part.replace("text_encoder", "tokenizer"), length))
    zeros = bool(pipeline.json("model_index.json").get("force_zeros_for_empty_prompt"))
    return Clip(tokenizers, encoders, torch.device(device), null_is_zero=zeros, pooled=pooled)


def _tokenizer(pipeline: PipelineFiles, name: str, length: int) -> Any:
    from transformers import CLIPTokenizer

    folder = pipeline.folder / name
    if not any((folder / file).is_file() for file in ("vocab.json", "tokenizer.json")):
        raise ConfigError(f"{folder} has no vocab.json and no tokenizer.json; expected a tokenizer of CLIP")
    with readable(folder):
        tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    if tokenizer.model_max_length > length:
        raise ConfigError(
            f"{folder}/tokenizer_config.json has model_max_length {tokenizer.model_max_length}, the text encoder "
            f"has room for {length}; expected at most that"
        )
    return tokenizer


ONE_CLIP = TextEncoderFamily(classes=("CLIPTextModel",), conditions=("context",), load=load_clip)
TWO_CLIPS = TextEncoderFamily(
    classes=("CLIPTextModel", "CLIPTextModelWithProjection"), conditions=("context", "pooled"), load=load_clip
)
