"""The training data of a run, checked against its model and its pretrained pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from fastdiff.batch import Condition, from_stored
from fastdiff.conditions import CONDITIONS, REFERENCE
from fastdiff.config.networks.pretrained import PretrainedConfig
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.data import DataConfig
from fastdiff.data.joined.info import JoinedInfo
from fastdiff.data.joined.reader import Shards
from fastdiff.data.joined.reading import open_shards
from fastdiff.data.loading.batches import Normaliser
from fastdiff.data.loading.fit import match_classes, require_features, require_fit, require_masks
from fastdiff.data.shards.format import DatasetInfo
from fastdiff.errors import ConfigError, DataError
from fastdiff.models.kernel_choice import DTYPES
from fastdiff.models.load import null_label, pretrained
from fastdiff.models.pretrained.pipeline import Pretrained

if TYPE_CHECKING:
    from fastdiff.data.loading.online import OnlineImages

Data: TypeAlias = "Shards | OnlineImages"


def open_data(config: RunConfig, device: torch.device) -> Data:
    """Open the local or cached remote shards of a run, or its images.

    Raises:
        ConfigError: the data do not fit the model.
        DataError: the data are damaged.
        StorageError: the data cannot be read.
    """
    if config.data.online:
        data = _open_images(config, device)
        require_fit(config.model, config.data.path, data.info)
        require_masks(config.objective, config.data.path, data.info)
        require_features(config.model, config.data, data.info)
        return data
    reader = open_shards(config.data)
    require_fit(config.model, config.data.described, reader.info)
    require_masks(config.objective, config.data.described, reader.info)
    require_features(config.model, config.data, reader.info)
    return reader


def open_held_out(network: ModelConfig, data: DataConfig, class_names: Sequence[str], flag: str) -> Shards:
    """Open held-out shards of a run, and read their classes as the training numbers them.

    Args:
        network: of the run, resolved.
        data: the held-out data.
        class_names: of the training, in the order of their numbers; empty: unknown.
        flag: of the path, for messages.

    Raises:
        ConfigError: the data do not fit the model, or have a class that the training has not.
        DataError: the data are damaged.
        StorageError: the data cannot be read.
    """
    reader = open_shards(data)
    if network.classes:
        reader.class_numbers = match_classes(reader.info, class_names, f"{flag} {data.described}")
    require_fit(network, data.described, reader.info)
    return reader


def with_captions(config: RunConfig, data: Data) -> RunConfig:
    """Return the run with captions of its data as the prompts of its sample images, where it has no prompts.

    They are spread evenly over the data set; equal ones count once. DataError: a sample is damaged.
    """
    wanted = config.validation.captions
    if config.validation.prompts or not wanted or not isinstance(data, Shards):
        return config
    return replace(config, validation=replace(config.validation, prompts=tuple(_captions(data, wanted))))


def references_of_captions(config: RunConfig, data: Data) -> Tensor | None:
    """Return the references of the prompts of ``with_captions``: those of the pictures of these captions.

    Returns:
        ``[prompts, N, C, h, w]`` normalised latents on the CPU, cropped at their centre to the smallest height and
        width; None: there are none, or the prompts are no captions of the data.

    Raises:
        DataError: a sample is damaged.
    """
    if not config.model.references or not isinstance(data, Shards):
        return None
    rows = _captions(data, config.validation.captions)
    if not rows or tuple(rows) != config.validation.prompts:
        return None
    normalise, found = Normaliser(data.info, torch.device("cpu")), []
    for row in rows.values():
        stored = {name: torch.from_numpy(value) for name, value in data.read([row]).items()}
        batch = normalise({**stored, "position": torch.tensor([row])})
        found.append(batch.condition[REFERENCE])
    height, width = (min(each.shape[axis] for each in found) for axis in (-2, -1))
    return torch.cat([_centre(each, height, width) for each in found])


def _captions(data: Shards, wanted: int) -> dict[str, int]:
    """Return captions spread evenly over a data set, each with its sample; equal ones count once."""
    found: dict[str, int] = {}
    for row in (number * len(data) // wanted for number in range(wanted)):
        with suppress(*([DataError] if data.substitute else [])):  # a damaged sample has no caption to draw then
            for caption in data.captions([row]):
                found.setdefault(caption, row)
    return found


def _centre(latents: Tensor, height: int, width: int) -> Tensor:
    top, left = (latents.shape[-2] - height) // 2, (latents.shape[-1] - width) // 2
    return latents[..., top : top + height, left : left + width]


def with_references(config: RunConfig, data: Data) -> RunConfig:
    """Return the run whose network takes the references of its data, unless it says their number itself."""
    column, model = data.info.columns.get(REFERENCE), config.model
    if column is None or model.references or not model.takes_references:
        return config
    return replace(config, model=replace(model, references=column.shape[0]))  # type: ignore[call-arg]  # of these


def with_autoencoder(config: RunConfig, data: Data) -> RunConfig:
    """Return the run with the autoencoder of its data, where neither a flag nor a pipeline gives one.

    A folder of this machine becomes absolute: the data set has it as it was typed.
    """
    by_pipeline = bool(config.pretrained.path) and not config.pretrained.is_file
    if by_pipeline or config.data.autoencoder:
        return config
    name = data.info.provenance.autoencoder
    found = str(Path(name).absolute()) if Path(name).is_dir() else name
    return replace(config, data=replace(config.data, autoencoder=found))


def null_condition(config: RunConfig, reader: Data) -> Condition:
    """Return the null condition (no class, no caption), one sample of each input that can be dropped, on the CPU.

    Raises:
        ConfigError: captions are dropped, but the data have no embedding of the empty caption.
    """
    kinds = {name: CONDITIONS[name].null for name in config.model.conditions}
    null: Condition = {name: null_label(config.model) for name, kind in kinds.items() if kind == "class"}
    if captioned := [name for name, kind in kinds.items() if kind == "caption"]:
        stored = from_stored({name: torch.from_numpy(value) for name, value in reader.null().items()})
        null |= {name: stored[name] for name in captioned if name in stored}
    shares = set_dropouts(config, reader) or (config.objective.condition_dropout,)
    if any(shares) and not null.keys() >= set(captioned):
        raise ConfigError(
            f"{config.data.described} has no embedding of the empty caption, which --objective.condition_dropout "
            f"{max(shares)} needs; encode again, or use --objective.condition_dropout 0"
        )
    return null


def set_dropouts(config: RunConfig, data: Data) -> tuple[float, ...]:
    """Return the share of dropped conditions of each data set; empty: none has one of its own."""
    info = data.info
    return info.condition_dropouts(config.objective.condition_dropout) if isinstance(info, JoinedInfo) else ()


def _open_images(config: RunConfig, device: torch.device) -> OnlineImages:
    from fastdiff.data.loading.online import OnlineImages

    dtype = DTYPES[config.performance.precision]
    return OnlineImages(
        config.data, pretrained(config.pretrained), device, dtype, seed=config.seed, takes=config.model.conditions
    )


def described_selection(data: Data) -> str:
    """Return what images for online encoding lack of their source; empty for shards, whose encode said it."""
    if isinstance(data, Shards):
        return ""
    lines = "\n".join(data.selection.lines(len(data)))
    return f"{data.folder}: {lines.replace('--max-samples', '--data.max-samples')}"  # the flag of encode, and that here


def check_provenance(pipeline: PretrainedConfig, data: DataConfig, info: DatasetInfo) -> None:
    """Require data encoded with the autoencoder and the text encoder of the run's pipeline.

    Their digests cover all weights, which are read for this check. ConfigError: they differ, or a part cannot be read,
    or the maximum of tokens differs, which prompts are embedded with.
    """
    if not pipeline.path or pipeline.is_file or data.online:
        return
    found = pretrained(pipeline)
    for part, name, made in (
        ("vae", "autoencoder", info.provenance.autoencoder_digest),
        ("text_encoder", "text encoder", info.provenance.text_encoder_digest),
    ):
        if made is not None and made != (here := found.digest(part)):
            raise ConfigError(
                f"{data.described} was encoded with another {name} (digest {made[:12]}) than that of "
                f"--pretrained.path {pipeline.path} (digest {here[:12]}); encode again with it, or give the "
                "pipeline that encoded the data"
            )
    _require_tokens(found, data, info)


def _require_tokens(pipeline: Pretrained, data: DataConfig, info: DatasetInfo) -> None:
    """Require that prompts are embedded with as many tokens as the captions of the data."""
    if info.provenance.text_encoder_digest is None:
        if pipeline.max_tokens is not None:
            raise ConfigError(
                f"--pretrained.max_tokens {pipeline.max_tokens}: {data.described} has no captions; leave it out"
            )
        return
    try:
        family = pipeline.text_family
    except ConfigError:
        if pipeline.max_tokens is not None:
            raise
        return  # of a package that is not installed here: only samples of prompts need it
    if family.tokens is None:
        return
    rows, here = info.columns["context"].shape[0] - family.fixed_tokens, pipeline.max_tokens or family.tokens
    if rows != here:
        raise ConfigError(
            f"{data.described} was encoded with captions of up to {rows} tokens, and prompts of this run would "
            f"have up to {here}; give --pretrained.max_tokens {rows}"
        )
