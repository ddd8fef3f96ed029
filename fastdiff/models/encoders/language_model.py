"""Language models as text encoders: captions to the hidden states of their tokens, by the record of a pipeline."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fastdiff.errors import ConfigError
from fastdiff.models.pipeline_files import INDEX, PipelineFiles, readable


def _as_it_is(tokenizer: Any, caption: str) -> str:
    return caption


def _nothing(tokenizer: Any) -> range:
    return range(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How a pipeline reads captions."""

    tokens: int
    """Maximum tokens of a caption, with those that the tokenizer and the text around the caption add."""
    text: Callable[[Any, str], str] = _as_it_is
    """Returns the text to read, by the tokenizer and the caption."""
    dropped: Callable[[Any], range] = _nothing
    """Returns the positions of tokens that are read but not returned, beyond ``tokens``."""
    layers: tuple[int, ...] = (-1,)
    """Hidden states that are returned, joined on channels: 0 is before the first layer, -1 after the last norm."""
    attends_padding: bool = False
    """Whether the model attends to padding as to tokens."""
    masked: bool = True
    """Whether a mask marks the tokens of the caption; otherwise captions are padded to the maximum, and what the model
    makes of padding is returned, too."""


class LanguageModel:
    """A language model that reads captions.

    Captions are padded on the right to the longest of a batch, and what is returned to the maximum, with zeros.

    Args:
        tokenizer: of the model.
        encoder: a model of transformers that returns hidden states.
        device: of the encoder.
        reading: of captions and, without ``negative``, of negative prompts.
        negative: reading of negative prompts and of the empty caption of guidance.
        max_tokens: replaces the maximum of the readings; None: theirs.
    """

    def __init__(
        self,
        tokenizer: Any,
        encoder: Any,
        device: torch.device,
        reading: Reading,
        *,
        negative: Reading | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self._tokenizer, self._encoder, self._device = tokenizer, encoder, device
        self._reading, self._negative = reading, negative or reading
        self._tokens = max_tokens or reading.tokens
        self._dropped = {each: each.dropped(tokenizer) for each in (self._reading, self._negative)}

    def parameters(self) -> Iterator[Tensor]:
        """Yield the weights of the model."""
        yield from self._encoder.parameters()

    def __call__(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return ``context [N, L, D]`` and, if the reading is masked, ``context_mask [N, L]`` bool."""
        return self._read(captions, self._reading)

    def negative(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return the conditions of negative prompts."""
        return self._read(captions, self._negative)

    def null(self) -> dict[str, Tensor]:
        """Return the conditions of the empty caption, read as a negative prompt."""
        return {name: value[0] for name, value in self.negative([""]).items()}

    def lost(self, captions: Sequence[str]) -> dict[int, int]:
        """Return the tokens of these captions that are not read, by the number that is read."""
        read = self._limit(self._reading)
        lost = sum(max(0, len(ids) - read) for ids in self._ids(captions, self._reading, cut=False))
        return {self._tokens: lost} if lost else {}

    def lengths(self, captions: Sequence[str]) -> list[int]:
        """Return how many tokens the model computes of each caption."""
        if not self._reading.masked:
            return [self._tokens] * len(captions)
        return list(map(len, self._ids(captions, self._reading)))

    def _limit(self, reading: Reading) -> int:
        return self._tokens + len(self._dropped[reading])

    def _ids(self, captions: Sequence[str], reading: Reading, *, cut: bool = True) -> list[list[int]]:
        """Return the tokens of each caption, without padding."""
        texts = [reading.text(self._tokenizer, caption) for caption in captions]
        limit = {"truncation": True, "max_length": self._limit(reading)} if cut else {"verbose": False}
        found: list[list[int]] = self._tokenizer(texts, padding=False, **limit)["input_ids"]
        return found

    @torch.no_grad()
    def _read(self, captions: Sequence[str], reading: Reading) -> dict[str, Tensor]:
        rows = [torch.tensor(ids, dtype=torch.long) for ids in self._ids(captions, reading)]
        lengths = torch.tensor([len(row) for row in rows], device=self._device)
        longest = int(lengths.max()) if reading.masked else self._limit(reading)
        ids = torch.zeros(len(rows), longest, dtype=torch.long).fill_(self._tokenizer.pad_token_id or 0)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = row
        mask = torch.arange(longest, device=self._device) < lengths[:, None]  # [N, longest]
        attended = {} if reading.attends_padding else {"attention_mask": mask.long()}
        states = self._states(ids.to(self._device), reading.layers, attended)
        if not reading.masked:
            return {"context": self._kept(states, reading)}
        return {
            name: _padded(self._kept(values, reading), self._tokens)
            for name, values in (("context", states.masked_fill(~mask[..., None], 0)), ("context_mask", mask))
        }

    def _states(self, ids: Tensor, layers: tuple[int, ...], attended: dict[str, Tensor]) -> Tensor:
        """Return the hidden states of layers, ``[N, L, D]``, joined on channels."""
        if layers == (-1,):
            found: Tensor = self._encoder(input_ids=ids, **attended).last_hidden_state
            return found
        states = self._encoder(input_ids=ids, output_hidden_states=True, **attended).hidden_states
        return torch.cat([states[layer] for layer in layers], dim=-1)

    def _kept(self, values: Tensor, reading: Reading) -> Tensor:
        """Return ``[N, L, ...]`` without the positions that the reading drops."""
        dropped = self._dropped[reading]
        return values if not dropped else torch.cat([values[:, : dropped.start], values[:, dropped.stop :]], dim=1)


def _padded(values: Tensor, tokens: int) -> Tensor:
    """Return ``[N, L, ...]`` with zeros up to ``tokens`` positions."""
    found = values.new_zeros(values.shape[0], tokens, *values.shape[2:])
    found[:, : values.shape[1]] = values
    return found


def load(
    pipeline: PipelineFiles,
    device: torch.device | str,
    dtype: torch.dtype,
    reading: Reading,
    *,
    negative: Reading | None = None,
    part: str = "text_encoder",
) -> LanguageModel:
    """Load the language model and the tokenizer of a part of a pipeline, the model without a head."""
    import transformers

    model = pipeline.load_part(getattr(transformers, pipeline.class_of(part)), part, device, dtype)
    model.config.get_text_config().use_cache = False  # of keys and values, for tokens to come
    return LanguageModel(
        _tokenizer(pipeline, part.replace("text_encoder", "tokenizer")),
        model.base_model,
        torch.device(device),
        reading,
        negative=negative,
        max_tokens=pipeline.max_tokens,
    )


def _tokenizer(pipeline: PipelineFiles, name: str) -> Any:
    import transformers

    folder = pipeline.folder / name
    if not (folder / "tokenizer_config.json").is_file():
        raise ConfigError(f"{folder} has no tokenizer_config.json; expected a tokenizer as transformers saves it")
    if not (folder / "tokenizer.json").is_file() and any(folder.glob("*.model")) and not find_spec("sentencepiece"):
        raise ConfigError(
            f"{folder} holds a vocabulary of SentencePiece and no tokenizer.json, and sentencepiece is not installed; "
            "run `pip install 'sentencepiece>=0.2,<1' 'protobuf>=4,<8'`"
        )
    listed = pipeline.json(INDEX).get(name)
    kind = str(listed[1]) if isinstance(listed, list) else ""
    with readable(folder):
        return getattr(transformers, kind, transformers.AutoTokenizer).from_pretrained(folder, local_files_only=True)
