"""Encode of several data sets into one folder, which ``--data.path`` of a training then takes as a whole."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastdiff.config.data_sets import read_list, write_list
from fastdiff.console import show
from fastdiff.data.encoding.images import encode_images
from fastdiff.data.encoding.options import EncodeOptions
from fastdiff.data.encoding.statistics import MEASURED
from fastdiff.data.images.listing import Listing
from fastdiff.data.images.masks import origin_of
from fastdiff.data.images.walk import nfc
from fastdiff.data.kohya.parts import Part, Parts
from fastdiff.data.shards.format import INFO_FILE, DatasetInfo
from fastdiff.errors import ConfigError, StorageError, remedy, require
from fastdiff.parallel.launcher import place_in_any_job


def encode_several(found: Parts, options: Mapping[str, Any], say: Callable[[str], None] = show) -> None:
    """Encode each data set into a folder of its own in OUT, and list them in ``sets.json`` at the end.

    As ``encode_images``, it is called by any number of processes, and resumes. Statistics of latents that are measured,
    and the map of a teacher's features, are those of the first data set, so that all have the same.

    Args:
        found: the data sets.
        options: fields of ``EncodeOptions`` that they have in common, with ``out``.
        say: as of ``encode_images``.

    Raises:
        ConfigError: OUT holds a data set, or --max-samples is given; as ``encode_images``.
        DataError: as ``encode_images``.
        StorageError: as ``encode_images``.
        Preempted: as ``encode_images``.
    """
    if options.get("max_samples") is not None:
        raise ConfigError("--max-samples: the source is several data sets, of which none is the first; leave it out")
    out, is_first = Path(options["out"]), place_in_any_job().rank == 0
    if (out / INFO_FILE).exists():
        raise ConfigError(f"{out} already holds a data set; choose another folder, or delete this one")
    each = [
        EncodeOptions(
            **{
                **options,
                **masks,
                **part.options,
                "source": part.source,
                "out": out / part.listed.folder,
            }
        )
        for part, masks in zip(found.parts, _masks(options, found.parts), strict=True)
    ]
    for line in (*found.told, *_unused(options, found.parts)) if is_first else ():
        say(line)
    of_first: dict[str, Any] = {}
    for part, options_of_part in zip(found.parts, each, strict=True):
        own = replace(options_of_part, **of_first)
        if is_first:
            what = "regularisation, " if part.listed.regularisation else ""
            whole = ", without masks" if options.get("masks") and not own.masks else ""
            say(f"{own.out}: {what}{part.listed.repeats} x {own.source}{whole}")
        encode_images(own, say)
        of_first = of_first or _shared(own)
    try:
        write_list(out, [part.listed for part in found.parts])
    except OSError as error:
        raise StorageError(f"cannot write to {out}: {error.strerror or error}; {remedy(error)}") from error
    if is_first:
        sets = len(read_list(str(out)))
        say(f"{out} is complete: {sets} data sets; train on all with `{shlex.join(['--data.path', str(out)])}`")


def _masks(options: Mapping[str, Any], parts: Sequence[Part]) -> list[dict[str, str]]:
    """Return the masks of each data set: the folder named like its own in that of all masks, or else that one.

    Regularisation pictures count as a whole if they have no folder of their own there, and so do those of a data set of
    which it holds no mask. ConfigError: there is no mask of any.
    """
    masks = options.get("masks", "")
    if origin_of(masks) != "files" or not Path(masks).is_dir():
        return [{}] * len(parts)
    found = []
    shared = _names(Path(masks))
    for part in parts:
        own = Path(masks) / Path(part.source).name
        used = not part.listed.regularisation and not shared.isdisjoint(_names(Path(part.source)))
        found.append({"masks": str(own) if own.is_dir() else masks if used else ""})
    require(
        any(each["masks"] for each in found),
        f"--masks {masks} holds no mask of any picture: expected there NAME.png for a picture NAME.jpg, or folders of "
        f"masks named as those of the pictures, such as {Path(parts[0].source).name}",
    )
    return found


def _names(folder: Path) -> set[str]:
    """Return the names of the pictures in a folder, without their endings."""
    return {nfc(Path(image).stem) for image in Listing.beside(folder, [""]).images}


def _unused(options: Mapping[str, Any], parts: Sequence[Part]) -> Iterator[str]:
    """Tell of the options that no data set takes, since what lists the data sets decides them for each."""
    for name, value in options.items():
        if all(part.options.get(name, value) != value for part in parts):
            yield f"--{name.replace('_', '-')} changes nothing: {options['source']} decides it for all data sets"


def _shared(first: EncodeOptions) -> dict[str, Any]:
    """Return the options of the further data sets that take what was measured on the first one."""
    measured = DatasetInfo.read(first.out).provenance.statistics.startswith(MEASURED)
    fitted = first.teacher and not first.teacher_basis
    return {
        **({"statistics": str(first.out)} if measured else {}),
        **({"teacher_basis": str(first.out)} if fitted else {}),
    }
