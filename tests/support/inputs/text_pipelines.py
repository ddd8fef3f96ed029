"""Tiny pipelines with random language models as text encoders, in the layout of diffusers, without a network."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    Gemma2Config,
    Gemma2Model,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
)

from fastdiff.models.pretrained import tiny_pipeline

WIDTH = 32
_PIECES = [*map(chr, range(32, 127)), "\n", "é"]
Part = tuple[Any, Any]
"""Model and tokenizer."""


def tokenizer(*, begin: str | None = None, end: str | None = None, pad: str = "<pad>", **options: Any) -> Any:
    """One token per character, in front of them ``begin`` and behind them ``end``."""
    names = [pad, "<unk>", *filter(None, (begin, end)), "<|im_start|>", "<|im_end|>", *_PIECES]
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    parts = [*([begin] if begin else []), "$A", *([end] if end else [])]
    added = [(name, vocabulary[name]) for name in (begin, end) if name]
    made.post_processor = processors.TemplateProcessing(single=" ".join(parts), special_tokens=added)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=pad, unk_token="<unk>", bos_token=begin, eos_token=end, **options
    )


def seeded(make: Callable[[], Any]) -> Any:
    """Return a model with the same random weights at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        return make().eval()


def t5(width: int = WIDTH) -> Part:
    """T5's encoder, with a bias by position that reaches across the caption."""
    config = T5Config(
        vocab_size=128, d_model=width, d_kv=8, d_ff=2 * width, num_layers=2, num_heads=4, dropout_rate=0.0,
        feed_forward_proj="gated-gelu", relative_attention_num_buckets=8, relative_attention_max_distance=32,
        initializer_factor=0.5,
    )  # fmt: skip
    return seeded(lambda: T5EncoderModel(config)), tokenizer(end="</s>")


def gemma(width: int = WIDTH) -> Part:
    """Gemma 2, with a window shorter than captions in every other layer."""
    config = Gemma2Config(
        vocab_size=128, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=64, pad_token_id=0, bos_token_id=2, eos_token_id=1,
    )  # fmt: skip
    return seeded(lambda: Gemma2Model(config)), tokenizer(begin="<bos>", padding_side="left")


_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>{% endif %}"
)


def qwen3(kind: type[Qwen3Model | Qwen3ForCausalLM], width: int = WIDTH, layers: int = 3) -> Part:
    """Qwen 3."""
    config = Qwen3Config(
        vocab_size=128, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    return seeded(lambda: kind(config)), tokenizer(pad="<|endoftext|>", chat_template=_CHAT)


def qwen_vl(width: int = WIDTH) -> Part:
    """Qwen 2.5 of text and vision."""
    text = {
        "vocab_size": 128, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": width}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    made = seeded(lambda: Qwen2_5_VLForConditionalGeneration(config))
    return made, tokenizer(pad="<|endoftext|>")


def clip(folder: Path) -> Part:
    """CLIP's text encoder with a pooled embedding."""
    return seeded(lambda: tiny_pipeline._text_encoder(projected=True)), tiny_pipeline._tokenizer(folder)


def write(folder: Path, pipeline: str, parts: Mapping[str, Part], vae: Path) -> Path:
    """Write a pipeline of this class with text encoders by folder, and the autoencoder of another pipeline.

    Returns:
        Its folder, which is created.
    """
    folder.mkdir(parents=True)
    (folder / "vae").symlink_to(vae / "vae")
    index: dict[str, Any] = {"_class_name": pipeline, "vae": ["diffusers", "AutoencoderKL"]}
    for name, (model, read) in parts.items():
        model.save_pretrained(folder / name)
        other = name.replace("text_encoder", "tokenizer")
        read.save_pretrained(folder / other)
        index[name] = ["transformers", type(model).__name__]
        index[other] = ["transformers", type(read).__name__]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder
