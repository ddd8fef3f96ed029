"""A caption for the card of a text-to-image run: one of its prompts, or one of its data."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from fastdiff.config.data import DataConfig
from fastdiff.config.run import RunConfig
from fastdiff.data.images.items import ImageItem
from fastdiff.data.images.sources import open_source
from fastdiff.data.shards.reader import LatentReader
from fastdiff.errors import FastdiffError


def with_prompt(config: RunConfig) -> RunConfig:
    """Return the run with a caption of its data as its prompt, if it has none and the data are on this machine."""
    if not config.model.text_conditional or config.validation.prompts:
        return config
    with suppress(FastdiffError, OSError):
        if caption := _first_caption(config.data):
            return replace(config, validation=replace(config.validation, prompts=(caption,)))
    return config


def _first_caption(data: DataConfig) -> str:
    """Return the first caption of a folder, or an empty one; neither code of a user nor the network is asked."""
    if not Path(data.path).exists():
        return ""
    if not data.online:
        with LatentReader(data.path) as reader:
            return next(iter(reader.captions([0])), "")
    source = open_source(
        data.path,
        samples_per_unit=1,
        image_column=data.image_column,
        caption_column=data.caption_column,
        dataset_config=data.dataset_config,
    )
    first = next(source.items(0))
    return next(iter(first.captions), "") if isinstance(first, ImageItem) else ""
