"""Conditions of a large set of samples: classes, prompts, or small images to enlarge."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastdiff.batch import Condition
from fastdiff.config.sections.sampler import Labels
from fastdiff.data.shards.format import canonical_json
from fastdiff.errors import ConfigError, require
from fastdiff.files import file_digest
from fastdiff.models.load import null_label
from fastdiff.sampling.class_names import ClassChoice
from fastdiff.sampling.npz import read_npz
from fastdiff.sampling.run import Run
from fastdiff.sampling.solvers import uniform_labels

_LONGEST = 1000
"""Length in characters up to which a plan keeps a list itself; it keeps a digest of longer ones."""
_PER_CLASS = 8
_MOST = 100_000_000
"""Largest number of images of a set, whose labels take 0.8 GB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """Requested content of the images; the fields are the options of ``fastdiff sample``."""

    num: int | None = None
    """Number of images; None: it follows from the other fields."""
    classes: ClassChoice | None = None
    """Names or numbers; None: all."""
    per_class: int | None = None
    """Images per class. None: with ``num`` see ``labels``, without it 8."""
    labels: Labels | None = None
    """How the classes of ``num`` images are chosen; None: as ``--sampling.labels`` of the run says."""
    prompts: Sequence[str] = ()
    negative: str | None = None
    per_prompt: int = 4
    references: Sequence[Path] = ()
    """Pictures that every prompt refers to."""
    low_res: Path | None = None
    """npz of the images to enlarge."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """Conditions of N images."""

    count: int
    """N."""
    of: Callable[[range], Condition]
    """Returns the model inputs of the images with these numbers, each ``[n, ...]`` on the CPU."""
    null: Condition
    """One unconditional sample of each input that guidance replaces."""
    labels: npt.NDArray[np.int64] | None
    """``[N]`` classes; None: the images have none."""
    kind: Callable[[int], str]
    """Returns the class of the image with a number, or the number of its prompt; empty: it has neither."""
    plan: dict[str, Any]
    """JSON values that determine all other fields."""


def conditions(run: Run, request: SampleRequest, seed: int) -> Conditions:
    """Build the conditions of all images.

    Raises:
        ConfigError: the model does not support the request, or the number of images is missing.
        DataError: the npz of small images cannot be read.
    """
    wanted = request.num or 0
    chosen = None if request.classes is None else run.class_names.numbers(request.classes)
    wanted = max(wanted, (request.per_class or 0) * len(chosen or range(run.known_classes or 1)))
    wanted = max(wanted, request.per_prompt * len(request.prompts))
    require(wanted <= _MOST, f"a set of {wanted} images, at most {_MOST}; draw several, with another --seed each")
    if run.config.model.text_conditional:
        return _of_prompts(run, request)
    require(not request.references, f"--reference: {run.folder} was trained with classes; leave it out")
    require(not request.prompts, f"{run.folder} was trained with classes, not captions; use --classes")
    require(
        request.labels is None or request.num is not None,
        f"--labels {request.labels} says how the classes of --num images are chosen; give --num",
    )
    require(
        request.num is None or request.per_class is None,
        "--num and --per-class both set the number of images; give one",
    )
    if request.low_res is not None or run.config.model.low_res_size:
        return _of_small_images(run, request)
    known = run.known_classes
    if not known:
        require(request.per_class is None, f"--per-class: {run.folder} was trained with no classes; use --num")
        require(request.labels is None, f"--labels: {run.folder} was trained with no classes; leave it out")
        require(
            request.num is not None, f"{run.folder} was trained with no classes: set the number of images with --num"
        )
        return _of_labels(run, request.num or 0, None, "none")
    labels = torch.tensor(chosen or range(known))
    of_which = _shortly(chosen) if chosen else f"all {known}"
    if request.num is None:
        each = request.per_class or _PER_CLASS
        return _of_labels(run, each * len(labels), labels.repeat(each), f"{each} of each class of {of_which}")
    if (request.labels or run.config.sampling.labels) == "balanced":
        return _of_labels(run, request.num, labels[torch.arange(request.num) % len(labels)], f"in turn from {of_which}")
    drawn = labels[uniform_labels(seed, range(request.num), len(labels))]
    return _of_labels(run, request.num, drawn, f"drawn from {of_which}")


def _of_labels(run: Run, count: int, labels: Tensor | None, how: str) -> Conditions:
    null = null_label(run.config.model)
    titles = run.class_names.titles(range(run.known_classes))

    def kind(image: int) -> str:
        label = -1 if labels is None else int(labels[image])
        title = titles[label] if titles and label >= 0 else ""
        return title if any(map(str.isalnum, title)) or label < 0 else f"class {label}"

    def of(index: range) -> Condition:
        return {"label": null.expand(len(index)) if labels is None else labels[index.start : index.stop]}

    return Conditions(
        count=count,
        of=of,
        null={"label": null},
        labels=None if labels is None else labels.numpy(),
        kind=kind,
        plan={"images": count, "classes": how},
    )


def _of_small_images(run: Run, request: SampleRequest) -> Conditions:
    side = run.config.model.low_res_size
    if request.low_res is None:
        raise ConfigError(
            f"{run.folder} was trained to enlarge images of {side} x {side}; give them with --low-res NPZ"
        )
    require(side > 0, f"--low-res: {run.folder} was not trained to enlarge images; leave it out")
    require(
        request.classes is None and request.per_class is None and request.labels is None,
        "--classes, --per-class and --labels cannot be combined with --low-res: the classes come from "
        f"{request.low_res}",
    )
    small, labels = read_npz(request.low_res)
    expected = side, side, run.config.model.channels
    require(
        small.shape[1:] == expected, f"{request.low_res} has images of {small.shape[1:]}, the model enlarges {expected}"
    )
    count = len(small) if request.num is None else request.num
    require(count <= len(small), f"--num {count}: {request.low_res} has {len(small)} images; leave it out")
    known = run.known_classes
    if known and labels is None:
        raise ConfigError(f"{request.low_res} has no labels (arr_1), and the model was trained with {known} classes")
    if known and labels is not None and (labels.min() < 0 or labels.max() >= known):
        raise ConfigError(
            f"{request.low_res} has labels from {labels.min()} to {labels.max()}, the model 0-{known - 1}"
        )
    given = torch.from_numpy(labels[:count]) if known and labels is not None else None
    found = _of_labels(run, count, given, "of the small images" if known else "none")

    def of(index: range) -> Condition:
        pixels = torch.from_numpy(small[index.start : index.stop]).permute(0, 3, 1, 2)
        return {**found.of(index), "low_res": pixels.float() / 127.5 - 1}

    return replace(found, of=of, plan={**found.plan, "low_res": file_digest(request.low_res)})


def _of_prompts(run: Run, request: SampleRequest) -> Conditions:
    require(bool(request.prompts), f"{run.folder} was trained with captions; give prompts with --prompt")
    for flag, value in (("num", request.num), ("labels", request.labels), ("low-res", request.low_res)):
        require(value is None, f"--{flag} is not for text-to-image models; set the number of images with --per-prompt")
    embedded, null = run.embedded(request.prompts, negative=request.negative, references=request.references)

    def of(index: range) -> Condition:
        chosen = torch.tensor(index) % len(request.prompts)
        return {name: value[chosen] for name, value in embedded.items()}

    def kind(image: int) -> str:
        return f"prompt {image % len(request.prompts)}"

    count = request.per_prompt * len(request.prompts)
    plan = {"images": count, "prompts": _shortly(list(request.prompts)), "negative_prompt": request.negative}
    plan |= {"references": list(map(file_digest, request.references))} if request.references else {}
    return Conditions(count=count, of=of, null=null, labels=None, kind=kind, plan=plan)


def _shortly(values: list[Any]) -> Any:
    """Return a list, or the digest of a long one, for a plan."""
    text = canonical_json(values)
    return values if len(text) <= _LONGEST else f"{len(values)} of sha256 {hashlib.sha256(text).hexdigest()}"
