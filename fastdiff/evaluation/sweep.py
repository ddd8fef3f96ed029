"""FID of a run over averages, guidance scales and intervals: first of few images each, then of all with the best.

``RUN/sweep.json`` has one row per measured combination. A row says how its images were drawn (the plan of the sample
set), by which reference and extractor they were measured, and with which versions. A combination with a row is not
drawn again, and unfinished images in ``RUN/sweep/`` are continued. The images of the best combination begin with the
few that it was found by.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdiff.config.run import RunConfig
from fastdiff.config.sections.performance import Precision
from fastdiff.config.sections.sampler import Labels
from fastdiff.console import log
from fastdiff.data.encoding.options import device_of
from fastdiff.data.selection import Counted
from fastdiff.data.shards.format import canonical_json
from fastdiff.errors import ConfigError, StorageError, require
from fastdiff.evaluation.image_comparison import Comparison, versions
from fastdiff.evaluation.image_sets import open_images
from fastdiff.files import file_digest, publish, read_bounded
from fastdiff.live_line import live_line
from fastdiff.parallel.launcher import Place
from fastdiff.sampling.conditions import SampleRequest
from fastdiff.sampling.npz import npz_names
from fastdiff.sampling.npz_parts import NpzParts
from fastdiff.sampling.run import Run
from fastdiff.sampling.sample_set import PlannedSet, SetOptions, planned

Row = dict[str, Any]
Interval = tuple[float, float]

_MOST_RECORD = 1 << 26
_POLL_S = 2.0
_OF_ADM = frozenset({"mu_s", "sigma_s"})
"""Spatial statistics, which ADM's reference files have beside ``mu`` and ``sigma``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepOptions:
    """What is drawn and measured."""

    widths: tuple[float, ...] = ()
    """Relative stds of power-function averages; empty: the average of ``ema``, ``ema_std`` or the run's first one."""
    scales: tuple[float, ...] = ()
    """Guidance scales; empty: the run's own."""
    intervals: tuple[Interval, ...] = ()
    """Lowest and highest noise levels with guidance; empty: the run's own."""
    few: int = 5_000
    """Images of each combination; rounded up to whole batches."""
    num: int = 50_000
    """Images of the best one."""
    labels: Labels | None = None
    """See ``SampleRequest``."""
    sampler: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of ``SamplerConfig``, before those of the run."""
    ema: float | None = None
    ema_std: float | None = None
    step: int | None = None
    batch: int = 64
    precision: Precision = "fp32"
    autoencoder: str | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One combination; None: the run's own."""

    width: float | None
    interval: Interval | None
    scale: float | None

    @property
    def name(self) -> str:
        """The combination as a part of a file name."""
        width = [] if self.width is None else [f"width-{self.width:g}"]
        scale = [] if self.scale is None else [f"cfg-{self.scale:g}"]
        interval = [] if self.interval is None else ["interval-{:g}-{:g}".format(*self.interval)]
        return "-".join([*width, *scale, *interval]) or "own"


def candidates(options: SweepOptions) -> list[Candidate]:
    """Return all combinations; those of one width stand together. ConfigError: a value is given twice."""
    given = {"widths": options.widths, "intervals": options.intervals, "scales": options.scales}
    for flag, values in given.items():
        require(len(set(values)) == len(values), f"--{flag}: a value is given twice; leave one of them out")
    every = product(options.widths or (None,), options.intervals or (None,), options.scales or (None,))
    # Without guidance all intervals are the same.
    found = [Candidate(width, None if scale == 1.0 else interval, scale) for width, interval, scale in every]
    return list(dict.fromkeys(found))


class Sweep:
    """The sweep of one run against one reference.

    Args:
        folder: run folder, or published file of weights.
        reference: what the images are measured against.
        comparison: the reference, opened.
        options: what is drawn.
        place: of this process; rank 0 measures and writes.
        published: configuration of a published file; None: a run.

    Raises:
        ConfigError: from every method: no such run, average or guidance; the images do not fit the reference.
        StorageError: from every method: a file cannot be read or written.
    """

    def __init__(
        self,
        folder: Path,
        reference: Path,
        comparison: Comparison,
        options: SweepOptions,
        place: Place,
        published: RunConfig | None = None,
    ) -> None:
        require(options.few >= 2, f"--few {options.few}: at least 2 images, of which a distribution is fitted")
        require(options.num >= options.few, f"--num {options.num}: at least --few {options.few}, which it begins with")
        self._folder, self._options, self._place, self._published = folder, options, place, published
        self._comparison = comparison
        self._measured_by = {
            "reference": str(reference),
            "reference_sha256": digest_of_reference(reference),
            "comparison": comparison.identity,
        }
        self._reference = reference
        self._opened: tuple[float | None, Run] | None = None

    def rows(self) -> Iterator[Row]:
        """Measure what has no row yet; yield the rows of the combinations, then that of the best one with all images.

        With a single combination it is measured with all images at once.
        """
        every = candidates(self._options)
        self._check_protocol(self._run(every[0].width).config)
        self._comparison.check(self._planned(every[0]).decoder.shape)
        best: tuple[float, Candidate] | None = None
        kept: NpzParts | None = None
        for number, candidate in enumerate(every if len(every) > 1 else [], 1):
            log.info(f"{candidate.name}: {number} of {len(every)}")
            row, parts = self._of_few(candidate)
            yield row
            is_best = best is None or row["fid"] < best[0]
            loser = kept if is_best else parts
            if loser is not None and self._place.rank == 0:
                loser.discard()  # also what an interrupted sweep has left
            if is_best:
                best, kept = (row["fid"], candidate), parts
        yield self._of_all(every[0] if best is None else best[1])

    @property
    def record(self) -> Path:
        """The file of the rows."""
        return self._result("sweep.json")

    def _result(self, name: str) -> Path:
        is_file = self._published is not None
        return self._folder.with_name(f"{self._folder.stem}.{name}") if is_file else self._folder / name

    def _of_few(self, candidate: Candidate) -> tuple[Row, NpzParts]:
        """Return the row of a combination, and its images."""
        drawing = self._planned(candidate)
        batch = self._options.batch
        count = min(-(-self._options.few // batch) * batch, self._options.num)
        made = self._made(drawing, candidate, count)
        if (row := self._found(made)) is not None:
            return row, drawing.npz()
        parts = drawing.draw_first(count, self._place)
        if self._place.rank:
            return self._awaited(made), parts
        images = _FirstImages(parts, parts.batches_of(count))
        return self._kept(made, self._comparison.measure(drawing.options.out, images, only_fid=True)), parts

    def _of_all(self, candidate: Candidate) -> Row:
        drawing = self._planned(candidate)
        made = self._made(drawing, candidate, self._options.num)
        if (row := self._found(made)) is not None:
            return row
        drawing.draw(self._place, log.info)
        if self._place.rank:
            return self._awaited(made)
        out = drawing.options.out
        return self._kept(made, self._comparison.measure(out, open_images(out)))

    def _run(self, width: float | None) -> Run:
        """Open the network with an average; the last one stays open."""
        if self._opened is None or self._opened[0] != width:
            self._opened = None  # before the next one takes memory
            options = self._options
            std = options.ema_std if width is None else width
            with live_line.during(f"loading {self._folder} ..."):
                run = Run(
                    self._folder,
                    ema=options.ema,
                    ema_std=std,
                    step=options.step,
                    device=device_of(self._place),
                    published=self._published,
                )
            self._opened = width, run
        return self._opened[1]

    def _planned(self, candidate: Candidate) -> PlannedSet:
        options, run = self._options, self._run(candidate.width)
        given = {**options.sampler, "cfg": candidate.scale, "cfg_interval": candidate.interval}
        if candidate.scale == 1.0:
            given["cfg_channels"] = None  # a list of scales may begin without guidance
        request = SampleRequest(num=options.num, labels=options.labels)
        common: dict[str, Any] = {
            "batch": options.batch,
            "precision": options.precision,
            "autoencoder": options.autoencoder,
        }
        chosen = planned(run, request, run.sampler(**given), SetOptions(out=Path(candidate.name), **common))
        digest = hashlib.sha256(canonical_json(chosen.plan)).hexdigest()[:8]
        out = self._result("sweep") / f"{candidate.name}-{digest}.npz"
        return replace(chosen, options=SetOptions(out=out, **common))

    def _made(self, drawing: PlannedSet, candidate: Candidate, count: int) -> Row:
        """Return what identifies a row: how its images are drawn and measured."""
        sampling = drawing.run.config.sampling
        return {
            "width": candidate.width,
            "cfg": drawing.sampler.cfg if drawing.sampler.cfg is not None else 1.0,
            "cfg_interval": drawing.sampler.cfg_interval,
            "images": count,
            "labels": self._options.labels or sampling.labels,
            "protocol": sampling.protocol,
            "samples": drawing.plan,
            **self._measured_by,
        }

    def _check_protocol(self, config: RunConfig) -> None:
        """Warn of a reference that is not that of the recipe."""
        names = frozenset() if self._reference.is_dir() else npz_names(self._reference)
        if config.sampling.protocol == "adm" and not names >= _OF_ADM:
            log.warning(
                f"--sampling.protocol adm: {self._reference} has no mu_s and sigma_s, so it is not the reference of "
                "ADM's evaluation; the figures cannot be compared with the recipe's"
            )

    def _found(self, made: Row) -> Row | None:
        wanted = json.loads(canonical_json(made))
        return next((row for row in self._recorded() if {**row, **wanted} == row), None)

    def _awaited(self, made: Row) -> Row:
        while (row := self._found(made)) is None:
            time.sleep(_POLL_S)
        return row

    def _kept(self, made: Row, figures: Mapping[str, Any]) -> Row:
        row: Row = {**json.loads(canonical_json(made)), **figures, "versions": versions()}
        content = json.dumps({"rows": [*self._recorded(), row]}, indent=2).encode() + b"\n"
        publish(self.record, content)
        return row

    def _recorded(self) -> list[Row]:
        path = self.record
        try:
            found = json.loads(read_bounded(path, _MOST_RECORD))["rows"]
        except FileNotFoundError:
            return []
        except (ValueError, KeyError, TypeError):
            raise StorageError(f"{path} is no record of a sweep; rename it, and a new one is written") from None
        return [row for row in found if isinstance(row, dict)]


class _FirstImages:
    """The first images of a set that is not finished."""

    left_out: tuple[Counted, ...] = ()

    def __init__(self, parts: NpzParts, batches: int) -> None:
        self._parts, self._batches = parts, batches
        self.size = parts.size

    def __len__(self) -> int:
        return self._parts.images(self._batches - 1).stop

    def batches(self, count: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield ``[B, H, W, C]``, B at most ``count``."""
        for block in self._parts.blocks(self._batches):
            for first in range(0, len(block), count):
                yield block[first : first + count]

    def name_of(self, index: int) -> str:
        """See ``ImageSet``."""
        return f"{self._parts.out}, image {index}"


def digest_of_reference(path: Path) -> str:
    """Return the sha256 of a file, or of the names and sizes of the files in a folder."""
    if not path.is_dir():
        if not path.is_file():
            raise ConfigError(f"--reference {path}: there is no such file or folder")
        return file_digest(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    listing = "".join(f"{file.relative_to(path)} {file.stat().st_size}\n" for file in files)
    return hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest()
