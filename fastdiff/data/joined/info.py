"""The description of several data sets as one, and the checks that they agree. It imports no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fastdiff.conditions import FEATURES
from fastdiff.config.data_sets import DataSet, Member, samples_per_epoch
from fastdiff.data.shards.format import LATENT, LOSS_MASK, Column, DatasetInfo, canonical_json, loss_mask_column
from fastdiff.errors import ConfigError
from fastdiff.plurals import counted
from fastdiff.sanitize import address


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedSet:
    """A data set among several."""

    name: str
    path: str
    digest: str
    samples: int
    per_epoch: int
    """Samples of it in an epoch."""
    loss_weight: float
    condition_dropout: float | None
    """Share of its samples whose condition is dropped; None: that of the run."""
    flipped: bool
    """Whether it is mirrored by ``--data.random_flip``."""

    @property
    def facts(self) -> dict[str, Any]:
        """What decides its samples, their number and their use."""
        found = {"digest": self.digest, "per_epoch": self.per_epoch, "loss_weight": self.loss_weight}
        own = {} if self.condition_dropout is None else {"condition_dropout": self.condition_dropout}
        return found | own

    def described(self, epoch: int, *, mirrors: bool = False) -> str:
        """Return the data set in words, with its share of an epoch of so many samples.

        Args:
            epoch: samples of an epoch.
            mirrors: whether the run mirrors samples, as far as it can.
        """
        passes, rest = divmod(self.per_epoch, self.samples)
        each = f"{counted(passes, 'time')} each" if not rest else f"{self.per_epoch / self.samples:.3g} times each"
        weight = "" if self.loss_weight == 1.0 else f", loss x {self.loss_weight:g}"
        if self.condition_dropout is not None:
            weight += f", conditions dropped {self.condition_dropout:.3g}"
        weight += ", not mirrored: encoded without --flip" if mirrors and not self.flipped else ""
        return (
            f"{self.name}: {address(self.path)}, {counted(self.samples, 'image')}, {each} = {self.per_epoch:,} of "
            f"{epoch:,} samples of an epoch ({self.per_epoch / epoch:.1%}){weight}"
        )


@dataclass(frozen=True, kw_only=True)
class JoinedInfo(DatasetInfo):
    """Several data sets: the shards of all, in the order of the data sets, and what they have in common."""

    sets: tuple[JoinedSet, ...]
    set_of_shard: tuple[int, ...]
    """Number of the data set of each shard."""

    @property
    def epoch(self) -> int:
        """Samples of an epoch, repeated ones counted each time."""
        return sum(each.per_epoch for each in self.sets)

    @property
    def facts(self) -> dict[str, Any]:
        """What decides the samples, their order and their weights, by data set: for the record of a run."""
        return {each.name: each.facts for each in self.sets}

    @cached_property
    def digest(self) -> str:
        """Sha256 of everything that decides the samples, their order and their weights."""
        return hashlib.sha256(canonical_json(["joined", list(self.facts.values())])).hexdigest()

    def condition_dropouts(self, of_run: float) -> tuple[float, ...]:
        """Return the share of dropped conditions of each data set, that of the run where it has none of its own.

        Empty: none has one.
        """
        own = [each.condition_dropout for each in self.sets]
        return tuple(of_run if share is None else share for share in own) if any(s is not None for s in own) else ()

    def share_of(self, shard: int) -> float:
        """Return the share of a shard of the samples of an epoch, repeated ones counted each time."""
        own = self.sets[self.set_of_shard[shard]]
        return self.shards[shard].samples / own.samples * own.per_epoch / self.epoch

    def lines(self, *, mirrors: bool = False) -> list[str]:
        """Return each data set in words; ``mirrors`` as of ``JoinedSet.described``."""
        return [each.described(self.epoch, mirrors=mirrors) for each in self.sets]


def join(sets: Sequence[DataSet], members: Sequence[Member], infos: Sequence[DatasetInfo]) -> JoinedInfo:
    """Describe several data sets as one.

    Sizes of latents may differ, as those of aspect-ratio buckets; the network says whether it takes them.

    Args:
        sets: the entries of ``--data.sets``.
        members: their data sets (``config.data_sets.members_of``).
        infos: the ``dataset.json`` of each of these.

    Raises:
        ConfigError: two data sets differ in what a batch must have in common, or one has no sample of an epoch.
    """
    first = infos[0]
    for member, info in zip(members[1:], infos[1:], strict=True):
        _require_alike(members[0], first, member, info)
    counts = samples_per_epoch(sets, members, [info.samples for info in infos])
    sizes = [info.buckets or (_size(info.latent),) for info in infos]
    flipped = any(info.flipped for info in infos)
    buckets = tuple(dict.fromkeys(itertools.chain(*sizes)))
    shards = tuple(
        dataclasses.replace(shard, bucket=buckets.index(own[shard.bucket]))
        for info, own in zip(infos, sizes, strict=True)
        for shard in info.shards
    )
    longest = [info.longest_caption for info in infos]
    known = [rows for rows in longest if rows is not None]
    latent = dataclasses.replace(first.latent, shape=(first.latent.shape[0], *buckets[0]))
    mask = {LOSS_MASK: loss_mask_column(latent)} if any(LOSS_MASK in info.columns for info in infos) else {}
    return JoinedInfo(
        columns={**first.columns, LATENT: latent, **mask},
        normalisation=first.normalisation,
        normalisations=first.normalisations,
        provenance=dataclasses.replace(first.provenance, source=", ".join(info.provenance.source for info in infos)),
        classes=first.classes,
        class_names=first.class_names,
        kind=first.kind,
        buckets=buckets if len(buckets) > 1 or first.buckets else (),
        flipped=flipped,
        captions=max(info.captions for info in infos),
        null=first.null,
        longest_caption=max(known) if len(known) == len(longest) else None,
        shards=shards,
        samples=sum(info.samples for info in infos),
        sets=tuple(
            JoinedSet(
                name=member.name,
                path=member.path,
                digest=info.digest,
                samples=info.samples,
                per_epoch=count,
                loss_weight=member.loss_weight,
                condition_dropout=member.condition_dropout,
                flipped=info.flipped if flipped else info.in_pixels,
            )
            for member, info, count in zip(members, infos, counts, strict=True)
        ),
        set_of_shard=tuple(number for number, info in enumerate(infos) for _ in info.shards),
    )


def _size(latent: Column) -> tuple[int, int]:
    _, height, width = latent.shape
    return height, width


def _require_alike(one: Member, first: DatasetInfo, other: Member, info: DatasetInfo) -> None:
    taught = FEATURES in first.columns and FEATURES in info.columns
    basis = f", the second with --teacher-basis {address(one.path)}" if taught else ""
    for what, (here, there) in _compared(first, info):
        if here != there:
            raise ConfigError(
                f"--data.sets: {address(one.path)} and {address(other.path)} differ in {what} ({_short(here)} and "
                f"{_short(there)}), so they have no common batches; encode both with the same pipeline and "
                f"options{basis}"
            )


def _compared(one: DatasetInfo, other: DatasetInfo) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield what the samples of a batch must have in common, and that of both data sets."""

    def pair(value: str) -> tuple[Any, Any]:
        return getattr(one, value), getattr(other, value)

    for part in ("autoencoder", "text_encoder", "teacher"):
        name = f"{part}_digest"
        yield (
            f"the {part.replace('_', ' ')} (digest)",
            (
                getattr(one.provenance, name),
                getattr(other.provenance, name),
            ),
        )
    columns = tuple(sorted(info.columns.keys() - {LOSS_MASK}) for info in (one, other))
    yield "the stored columns", (columns[0], columns[1])
    for name in columns[0]:
        yield f"the {name}", (_column(name, one.columns[name]), _column(name, other.columns[name]))
    yield "the content of the latents", pair("kind")
    yield "the normalisation of the latents", pair("normalisation")
    yield "the normalisation of features", pair("normalisations")
    yield "the embeddings of the empty caption", (sorted(one.null), sorted(other.null))
    yield "the number of classes", pair("classes")
    yield "the names of the classes", pair("class_names")


def _column(name: str, column: Column) -> str:
    shape = column.shape[:1] if name == LATENT else column.shape
    return f"{column.dtype} {'x'.join(map(str, shape))}{' channels' if name == LATENT else ''}"


def _short(value: Any) -> str:
    text = str(value)
    return f"{text[:57]}..." if len(text) > 60 else text
