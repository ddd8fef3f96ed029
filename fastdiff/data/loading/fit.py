"""Checks of a data set against the network of a run, by ``dataset.json`` and the flags alone: torch is not imported.

``fastdiff train`` makes them before it starts the ranks, which import for seconds.
"""

import difflib
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path

from fastdiff.conditions import CAPTIONED, FEATURES, OF_IMAGE, REFERENCE, TEACHER_TOKEN, Shape, fixed_sizes, of_source
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.presets import encode_command
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.data import DataConfig
from fastdiff.config.sections.objective import ObjectiveConfig
from fastdiff.data.joined.reading import paths_of, read_info
from fastdiff.data.shards.format import INFO_FILE, LOSS_MASK, DatasetInfo
from fastdiff.data.shards.remote import is_remote
from fastdiff.errors import ConfigError, DataError, require
from fastdiff.sanitize import address, escape, is_address


def check_data_set(config: RunConfig, preset: str | None) -> None:
    """Require the data set of a run, complete and of the shapes of its network.

    A remote data set is left to the ranks, which cache it, and so are images for online encoding. The network of a
    pipeline is not known before its weights are here.

    Raises:
        ConfigError: the data set does not fit the network.
        DataError: it is missing or damaged.
        StorageError: it cannot be read.
    """
    data = config.data
    if not data.entries:
        raise ConfigError("--data.path is missing; give the output folder of `fastdiff encode`")
    flag = "--data.sets" if data.sets else "--data.path"
    given = [(flag, each.path) for each in data.entries]
    for flag, text in (*given, ("--validation.data", config.validation.data)):
        require(
            not is_address(text) or is_remote(text),
            f"{flag} {address(text)}: not an address that can be read; expected http://, https:// or s3://, or a path "
            "of this machine",
        )
    if data.online:
        return
    paths = paths_of(data)
    for path in paths:
        if not is_address(path) and not (Path(path) / INFO_FILE).exists():
            what = f"it has no {INFO_FILE}, which is written last" if Path(path).exists() else "there is no such folder"
            raise DataError(
                f"{given[0][0]} {path}: no data set, {what}; make it with `{encode_command(preset, path)}`",
                everywhere=True,
            )
    if any(map(is_address, paths)):
        return
    info = read_info(data)
    if not config.pretrained.weights or config.pretrained.is_file:
        require_fit(config.model, data.described, info)
    require_flips(data, info)
    require_masks(config.objective, data.described, info)
    require_features(config.model, data, info)
    held_out = Path(config.validation.data) / INFO_FILE
    if config.model.classes and config.validation.data and held_out.is_file():
        match_classes(DatasetInfo.read(held_out.parent), info.class_names, f"--validation.data {held_out.parent}")


def match_classes(held_out: DatasetInfo, names: Sequence[str], what: str) -> list[int] | None:
    """Return the numbers in training of the classes of held-out data, found by name.

    Args:
        held_out: the data, which may have fewer classes, in another order.
        names: of the classes in training, in the order of their numbers; empty: unknown.
        what: the flag and the path of the data, for messages.

    Returns:
        One number per class; None: the classes are numbered alike, or one side has no names to compare.

    Raises:
        ConfigError: a class is none of the training, or several of it have its name.
    """
    if not (held_out.class_names and names) or held_out.class_names == tuple(names):
        return None
    trained: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        trained.setdefault(unicodedata.normalize("NFC", name), []).append(number)
    found = [trained.get(unicodedata.normalize("NFC", name), []) for name in held_out.class_names]
    for name, numbers in zip(held_out.class_names, found, strict=True):
        if not numbers:
            near = difflib.get_close_matches(name, trained, n=1)
            hint = f" (the nearest is {escape(near[0])})" if near else ""
            raise ConfigError(
                f"{what}: its class {escape(name)} is none of the {len(names)} classes of the training{hint}; encode "
                "them without that class, or under its name in the training"
            )
        if len(numbers) > 1:
            raise ConfigError(
                f"{what}: {len(numbers)} classes of the training have the name {escape(name)}; rename them"
            )
    return [number for numbers in found for number in numbers]


def require_flips(config: DataConfig, info: DatasetInfo) -> None:
    """Raise ConfigError if samples are to be mirrored, and a data set has neither mirrored latents nor pixels."""
    if config.random_flip and not (info.flipped or info.in_pixels):
        raise ConfigError(
            f"--data.random-flip, also of a preset: {config.described} holds no flipped latents; encode with "
            "--flip, or train with --data.no-random-flip"
        )


def trains_masked(objective: ObjectiveConfig, info: DatasetInfo) -> bool:
    """Return whether the masks of a data set weight the loss."""
    return objective.masked is not False and LOSS_MASK in info.columns


def require_masks(objective: ObjectiveConfig, path: str, info: DatasetInfo) -> None:
    """Raise ConfigError if a masked loss is asked for without masks, or the loss cannot be masked."""
    require(
        not objective.masked or LOSS_MASK in info.columns,
        f"--objective.masked True: {address(path)} holds no masks; encode with --masks, or leave the flag out",
    )
    require(
        not (objective.plugin and trains_masked(objective, info)),
        f"--objective.plugin {objective.plugin}: {address(path)} holds masks, and a loss of your own has no positions "
        "that they could weight; use --objective.masked False, or leave the plug-in out",
    )


def require_features(network: ModelConfig, data: DataConfig, info: DatasetInfo) -> None:
    """Raise ConfigError unless training data have the features of a teacher with which the network is aligned."""
    if not (expected := network.aligned_shape):
        return
    path = data.described
    column = info.columns.get(FEATURES)
    require(
        column is not None,
        f"{address(path)} holds no features of a teacher, which --model.aligned_width {expected[0]} takes; encode with "
        f"--teacher ID --teacher-side {expected[1]} --teacher-width {expected[0]}, or leave the flag out",
    )
    assert column is not None
    found = column.shape
    require(
        found[1:] == expected[1:],
        f"{address(path)} holds {found[1]} x {found[2]} features of a teacher for each picture, the model has "
        f"{expected[1]} x {expected[2]} patches; encode with --teacher-side {expected[1]}",
    )
    require(
        found[0] == expected[0],
        f"{address(path)} holds features of a teacher of the width {found[0]}; use --model.aligned_width {found[0]}",
    )
    require(
        not (network.aligned_token and TEACHER_TOKEN in info.normalisations),
        f"--model.aligned_token: {address(path)} holds the class token of its autoencoder and the features of another "
        "teacher, to which one head would project; give --model.no-aligned-token",
    )
    require(
        info.flipped or not data.random_flip,
        f"--data.random-flip, also of a preset: {address(path)} holds the features of the pictures as they are; encode "
        "with --flip, or train with --data.no-random-flip",
    )


def require_fit(network: ModelConfig, path: str, info: DatasetInfo) -> None:
    """Raise ConfigError unless the data set ``info`` of ``path`` has the latents and the conditions of the network."""
    _check_latents(network, path, info)
    _check_columns(network, path, info)
    _check_references(network, path, info)
    if network.text_conditional:
        _check_conditions(network, path, info)
    else:
        _check_classes(network, path, info)


def _check_latents(network: ModelConfig, path: str, info: DatasetInfo) -> None:
    channels, height, width = info.latent.shape
    channels //= 2 if info.kind == "posterior" else 1
    if network.any_size:
        sizes, factor = info.buckets or ((height, width),), network.smallest_factor
        wrong = [size for size in sizes if size[0] % factor or size[1] % factor]
        if channels != network.channels or wrong:
            raise ConfigError(
                f"{address(path)} holds latents of {channels} channels and sizes {sizes}, the model takes "
                f"{network.channels} channels and sizes that divide by {factor}; encode with another --resolution"
            )
    elif info.buckets or (channels, height, width) != (network.channels, network.size, network.size):
        square = height == width and not info.buckets
        classes = f" --model.classes {info.classes}" if _too_few_classes(network, info) else ""
        remedy = (
            f"--model.channels {channels} --model.size {height}{classes}" if square else "square latents of one size"
        )
        raise ConfigError(
            f"{address(path)} holds latents of shape {(channels, height, width)}, the model takes "
            f"{(network.channels, network.size, network.size)}; use {remedy}"
        )


def _check_columns(network: ModelConfig, path: str, info: DatasetInfo) -> None:
    """Require what the network takes of the autoencoder beside the latents."""
    for name in of_source("encoder", network.conditions):
        expected, column = network.conditions[name], info.columns.get(name)
        if column is None:
            raise ConfigError(
                f"{address(path)} holds no {name}, the model takes {_described({name: expected})}; encode with "
                "--teacher-token, or with an autoencoder that gives it (a representation autoencoder), or use "
                "--model.teacher_width 0"
            )
        require(
            column.shape == expected,
            f"{address(path)} holds {_described({name: column.shape})}, the model takes {expected[0]}; "
            f"use --model.teacher_width {column.shape[0]}",
        )


def _check_references(network: ModelConfig, path: str, info: DatasetInfo) -> None:
    """Require as many references as the network takes, if that is known already."""
    found = info.columns[REFERENCE].shape[0] if REFERENCE in info.columns else 0
    require(
        not network.references or network.references == found,
        f"{address(path)} has {found or 'no'} references of each picture, the model takes {network.references}; encode "
        "with --references, or use another --model.references",
    )


def _check_classes(network: ModelConfig, path: str, info: DatasetInfo) -> None:
    if info.classes is None and network.needs_classes and network.classes:
        raise ConfigError(
            f"{address(path)} has no classes, but the model has {network.classes}, which would never be "
            "trained; encode with --classes-from, or use --model.classes 0"
        )
    if _too_few_classes(network, info):
        raise ConfigError(
            f"{address(path)} has {info.classes} classes, but the model has {network.classes}; use "
            f"--model.classes {info.classes}"
        )


def _too_few_classes(network: ModelConfig, info: DatasetInfo) -> bool:
    return info.classes is not None and 0 < network.classes < info.classes


def _check_conditions(network: ModelConfig, path: str, info: DatasetInfo) -> None:
    """Require the conditions of captions that the network takes, no others, and those of images that it takes."""
    expected = fixed_sizes({n: shape for n, shape in network.conditions.items() if n in (*CAPTIONED, *OF_IMAGE)})
    found = fixed_sizes({n: info.columns[n].shape for n in (*CAPTIONED, *expected) if n in info.columns})
    if found != expected:
        raise ConfigError(
            f"{address(path)} holds {_described(found)}; the model takes {_described(expected)}; encode captions with "
            "`fastdiff encode --pretrained` and the pipeline of the model"
        )


def _described(sizes: Mapping[str, Shape]) -> str:
    named = [f"{name} of {'x'.join(map(str, size))}" if size else name for name, size in sizes.items()]
    return " and ".join(named) or "no embeddings of captions"
