"""Text-to-image sampling outside the network: embedding of prompts, and levels of decoded images."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastdiff.batch import Condition, without_padding
from fastdiff.conditions import REFERENCE, image_conditions, of_source
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.console import log
from fastdiff.errors import require
from fastdiff.models.pretrained.pipeline import Pretrained


@torch.no_grad()
def encode_prompts(
    pipeline: Pretrained,
    prompts: Sequence[str],
    model: ModelConfig,
    *,
    negative: str | None = None,
    references: Tensor | None = None,
) -> tuple[Condition, Condition]:
    """Embed prompts in fp32 on the CPU; the text encoder is loaded for this and freed.

    Args:
        pipeline: provides the text encoder.
        prompts: N captions.
        model: configuration of the network; its image size is an input of SDXL.
        negative: negative prompt of guidance; None: the unconditional one.
        references: normalised latents of the pictures that all prompts refer to, ``[R, C, h, w]``, or each of its own,
            ``[N, R, C, h, w]``; None: none.

    Returns:
        The condition, ``[N, ...]`` each, and the unconditional one, a single sample of each input.

    Raises:
        ConfigError: the text encoder does not give a condition that the network takes.
    """
    given, wanted = pipeline.text_family.conditions, of_source("caption", model.conditions)
    for name in wanted:
        require(
            name in given,
            f"the text encoder of {pipeline.path} gives {' and '.join(given)}, but not {name}, which the network "
            "takes; use the pipeline that encoded the data",
        )
    if model.references and references is None:
        log.warning(
            f"drawing from prompts alone: the network was trained with {model.references} references of each picture; "
            "give some by --validation.references of `fastdiff train`, or by --reference of `fastdiff sample`"
        )
    encoder = pipeline.text()
    condition = without_padding(encoder(prompts))
    asked = None if negative is None else encoder.negative([negative])
    null = encoder.null() if asked is None else {name: value[0] for name, value in asked.items()}
    null = without_padding(null)
    pixels = (model.size * pipeline.latent_space.factor,) * 2
    sizes = image_conditions(model.conditions, pixels, (0, 0), pixels)
    of_image = {name: torch.tensor(values).expand(len(prompts), -1) for name, values in sizes.items()}
    given_pictures = {} if references is None else {REFERENCE: references.expand(len(prompts), *references.shape[-4:])}
    return {n: condition[n] for n in wanted} | of_image | given_pictures, {n: null[n] for n in wanted}


def repeated(condition: Condition, times: int) -> Condition:
    """Repeat ``[N, ...] -> [times * N, ...]``, for the rows of a grid with one column per prompt."""
    return {name: value.repeat(times, *(1 for _ in value.shape[1:])) for name, value in condition.items()}


def as_bytes(pixels: Tensor) -> Tensor:
    """Convert ``[N, C, H, W]`` in [-1, 1] to uint8."""
    return ((pixels.nan_to_num(0, 0, 0) + 1) / 2 * 255).round().clamp(0, 255).to(torch.uint8)
