"""Qwen in Z-Image, Flux.2 klein and Qwen-Image: captions as a user's turn in a chat."""

from functools import cache, partial
from typing import Any

from fastdiff.errors import require
from fastdiff.models.encoders.family import TextEncoderFamily
from fastdiff.models.encoders.language_model import Reading, load


def _as_turn(tokenizer: Any, caption: str, *, thinking: bool) -> str:
    """Return the caption in the chat template of the tokenizer, up to the start of the answer."""
    require(bool(tokenizer.chat_template), "the tokenizer of the pipeline has no chat template; download it again")
    turns = [{"role": "user", "content": caption}]
    text: str = tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
    )
    return text


@cache
def _template() -> tuple[str, int]:
    """Return Qwen-Image's template, and how many of its first tokens are dropped, as diffusers has them."""
    from diffusers import QwenImagePipeline

    pipeline = QwenImagePipeline(scheduler=None, vae=None, text_encoder=None, tokenizer=None, transformer=None)
    return pipeline.prompt_template_encode, pipeline.prompt_template_encode_start_idx


def _described(tokenizer: Any, caption: str) -> str:
    return _template()[0].format(caption)


def _of_template(tokenizer: Any) -> range:
    return range(_template()[1])


_THINKING = Reading(tokens=512, text=partial(_as_turn, thinking=True), layers=(-2,))
_PADDED = Reading(tokens=512, text=partial(_as_turn, thinking=False), layers=(9, 18, 27), masked=False)
_DESCRIBED = Reading(tokens=1024, text=_described, dropped=_of_template)

Z_IMAGE = TextEncoderFamily(
    classes=("Qwen3Model",),
    pipelines=("ZImagePipeline",),
    tokens=_THINKING.tokens,
    conditions=("context", "context_mask"),
    load=partial(load, reading=_THINKING),
)
FLUX2_KLEIN = TextEncoderFamily(
    classes=("Qwen3ForCausalLM",),
    pipelines=("Flux2KleinPipeline",),
    tokens=_PADDED.tokens,
    conditions=("context",),
    load=partial(load, reading=_PADDED),
)
QWEN_IMAGE = TextEncoderFamily(
    classes=("Qwen2_5_VLForConditionalGeneration",),
    pipelines=("QwenImagePipeline",),
    tokens=_DESCRIBED.tokens,
    conditions=("context", "context_mask"),
    load=partial(load, reading=_DESCRIBED),
)
