"""What ``dataset.json`` tells the command line: the size of a data set, and the fields of the network that it decides.

Only that file is read, and its digest is not checked: the checks before the start do that.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from fastdiff.conditions import REFERENCE, padded_tokens
from fastdiff.config.arguments.types import Parser
from fastdiff.config.data_sets import DataSet, members_of, parse_sets
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.presets import PATCHES
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.data import DataConfig
from fastdiff.errors import DataError
from fastdiff.files import read_bounded
from fastdiff.run_files import read_inside
from fastdiff.sanitize import is_address

INFO_FILE = "dataset.json"
_COMMITTED = "step-*/MANIFEST.json"
"""In the folder of the checkpoints; ``checkpoint.manifest`` reads it, from a package above."""
_LARGEST = 1 << 28  # bytes
_OF_MODEL = re.compile(r"--model\.([\w-]+)(?:=.*)?", re.DOTALL)
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)


def read_description(path: str) -> Any:
    """Return the ``dataset.json`` of a folder; OSError, ValueError or RecursionError: missing or unreadable."""
    return json.loads(read_bounded(Path(path) / INFO_FILE, _LARGEST))


def data_flags(flags: Sequence[str]) -> dict[str, Any]:
    """Return what flags say of the data, as fields: ``path`` and ``sets``, None where they say nothing."""
    own, _ = _field_parser().parse_known_args(list(flags))
    return {"path": own.path, "sets": own.sets}


def named_sets(data: DataConfig, path: str | None, sets: Sequence[str] | None) -> tuple[DataSet, ...]:
    """Return the data sets of a run.

    Args:
        data: of the run before the flags.
        path: of ``--data.path``; None: not given.
        sets: of ``--data.sets``; None: not given.

    Raises:
        ConfigError: an entry of ``--data.sets`` is none.
    """
    if sets is not None:
        return parse_sets(sets)
    if path is not None:
        return (DataSet(path=path),) if path else ()
    return data.entries


def network_flags(
    flags: Sequence[str], in_file: Mapping[str, Any], default: RunConfig, preset: str | None, *, resumes: bool = True
) -> list[str]:
    """Return the ``--model`` flags that follow from the data set: channels, size, classes, width, length of captions.

    What a flag or a file gives is left as it is, and so is what the pipeline of pretrained weights describes. A run
    that is resumed keeps its own values, wherever its data lie now. The patch of some presets follows from the size,
    also from one that is given.

    Args:
        flags: of the fields, as given.
        in_file: fields of the ``--config`` file.
        default: the run before the flags.
        preset: its name; the patch of some follows from the size.
        resumes: whether the run goes on from a checkpoint in its folder; False: ``--resume never``.

    Returns:
        Nothing of a data set that is not on this machine, or cannot be read: the checks before the start explain it.

    Raises:
        ConfigError: no patch of the preset fits the size.
    """
    own, _ = _field_parser().parse_known_args(list(flags))
    given = _given(flags, in_file)
    of_weights = default.pretrained.weights if own.weights is None else own.weights
    known = default.model.undescribed if of_weights else [field.name for field in fields(default.model)]
    names = set(known) - given
    if not names:
        return []
    entries = named_sets(default.data, own.path, own.sets)
    online = own.online or default.data.online
    found = {} if online else _of_data(entries, default.model)
    if resumes:
        found |= _of_resumed(Path(own.folder or default.output.folder), default.model, patch=preset in PATCHES)
    if preset in PATCHES and "patch" in names - found.keys():
        in_data = default.model.size if "size" in given else found.get("size", default.model.size)
        found["patch"] = PATCHES[preset](own.size or in_data)
    return [part for name, value in found.items() if name in names for part in (f"--model.{name}", str(value))]


def _given(flags: Sequence[str], in_file: Mapping[str, Any]) -> set[str]:
    """Return the names of the fields of the network that flags or a file give."""
    model = in_file.get("model")
    matches = [match[1].replace("-", "_") for flag in flags if (match := _OF_MODEL.fullmatch(flag))]
    return {*matches, *(model if isinstance(model, dict) else ())}


def _of_data(entries: Sequence[DataSet], model: ModelConfig) -> dict[str, int]:
    """Return what the data sets decide; nothing if one is not on this machine, or cannot be read."""
    with suppress(*_UNREADABLE, DataError):
        paths = [member.path for member in members_of(entries)]
        if paths and not any(map(is_address, paths)):
            return _decided(_common(list(map(read_description, paths))), model)
    return {}


def _common(every: Sequence[Any]) -> Any:
    """Return the description of several data sets: that of the first, with the longest caption and the sizes of all."""
    first = every[0]
    longest = [info.get("longest_caption") for info in every]
    sizes = {tuple(info["columns"]["latent"]["shape"][1:]) for info in every}
    buckets = [size for info in every for size in info.get("buckets") or ()]
    return first | {
        "longest_caption": None if None in longest else max(longest),
        "buckets": buckets or (sorted(sizes) if len(sizes) > 1 else []),
    }


def _decided(info: Any, model: ModelConfig) -> dict[str, int]:
    """Return what a data set decides; an unconditional network stays so, and classes that are missing stay missed."""
    columns = info["columns"]
    channels, height, width = columns["latent"]["shape"]
    decided = {"channels": channels // 2 if info.get("kind") == "posterior" else channels}
    if buckets := info.get("buckets"):  # about as many pixels each: pictures are drawn as squares of these
        factor = model.smallest_factor
        decided["size"] = max(factor, round(max(h * w for h, w in buckets) ** 0.5 / factor) * factor)
    elif height == width and height % model.smallest_factor == 0:
        decided["size"] = height
    if info.get("classes") and model.classes:
        decided["classes"] = info["classes"]
    for column, field in model.text_fields.items():
        if column in columns and column in model.conditions:
            decided[field] = columns[column]["shape"][-1]
    if model.text_length and "context" in columns:
        decided[model.text_length] = padded_tokens(info.get("longest_caption"), columns["context"]["shape"][0])
    if model.takes_references and REFERENCE in columns:
        decided["references"] = columns[REFERENCE]["shape"][0]
    if any(type(value) is not int or value < 1 for value in decided.values()):
        raise ValueError(f"{decided}: expected positive whole numbers")
    return decided


def _of_resumed(folder: Path, model: ModelConfig, *, patch: bool) -> dict[str, int]:
    """Return the values of the run in a folder that has a committed checkpoint; one without starts anew."""
    names = {"channels", "size", "classes", *model.text_fields.values(), *(["patch"] if patch else [])}
    names |= {model.text_length} - {""} | ({"references"} if model.takes_references else set())
    with suppress(*_UNREADABLE):
        if any((folder / "checkpoints").glob(_COMMITTED)):
            own = json.loads(read_inside(folder, "run.json", _LARGEST))["config"]["model"]
            if own["kind"] == model.kind:
                return {name: own[name] for name in sorted(names) if type(own.get(name)) is int}
    return {}


def _field_parser() -> Parser:
    """Return a parser of the fields that decide where the values come from; tyro parses them again."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--data.path", dest="path")
    parser.add_argument("--data.sets", dest="sets", nargs="*")
    parser.add_argument("--data.online", dest="online", action="store_true")
    parser.add_argument("--output.folder", dest="folder")
    parser.add_argument("--model.size", dest="size", type=_whole)
    parser.add_argument("--pretrained.weights", dest="weights", action="store_true", default=None)
    parser.add_argument("--pretrained.no-weights", "--pretrained.no_weights", dest="weights", action="store_false")
    return parser


def _whole(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 10 else None
