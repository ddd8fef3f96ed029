"""Gemma 2 in Sana: captions follow an instruction, whose tokens are dropped (Xie et al. 2024, arXiv:2410.10629).

The instruction asks the model for more detail. Of what it is followed by, the first token of the text is kept, the last
one of the instruction and those of the caption; negative prompts and the empty caption of guidance have no instruction.
"""

from functools import cache, partial
from typing import Any

from fastdiff.models.encoders.family import TextEncoderFamily
from fastdiff.models.encoders.language_model import Reading, load
from fastdiff.models.encoders.t5 import stripped


@cache
def _instruction() -> str:
    """Return the published instruction, the default of diffusers' pipeline."""
    import inspect

    from diffusers import SanaPipeline

    lines = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default
    return "\n".join(lines)


def _instructed(tokenizer: Any, caption: str) -> str:
    return _instruction() + stripped(tokenizer, caption)


def _of_instruction(tokenizer: Any) -> range:
    """Return the positions between the first token and the last one of the instruction."""
    return range(1, max(1, len(tokenizer.encode(_instruction())) - 1))


_NEGATIVE = Reading(tokens=300, text=stripped)
_POSITIVE = Reading(tokens=300, text=_instructed, dropped=_of_instruction)

SANA = TextEncoderFamily(
    classes=("Gemma2Model",),
    pipelines=("SanaPipeline",),
    tokens=_POSITIVE.tokens,
    conditions=("context", "context_mask"),
    load=partial(load, reading=_POSITIVE, negative=_NEGATIVE),
)
