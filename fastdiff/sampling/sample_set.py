"""``fastdiff sample`` with ``--npz`` or ``--pngs``: a set of samples of any size, drawn by any number of processes.

The images are drawn in batches of one size, whose borders are a function of the number of images alone; rank r of W
draws the batches r, r + W, ..., then those of other ranks on which no living process works. Every rank computes an
image by the same operations on the same numbers. The files are therefore the same, byte by byte, for every W and after
every kill, on machines with the same hardware and libraries. The ranks communicate only through files
(``shared_set.SharedSet``). Each of them ends with the complete set: it waits for the batches that others have begun.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastdiff.config.sections.performance import Precision
from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.console import show
from fastdiff.data.encoding.autoencoder import reproducible
from fastdiff.errors import ConfigError
from fastdiff.models.kernel_choice import DTYPES
from fastdiff.parallel.claims import in_turn
from fastdiff.parallel.devices import require_precision
from fastdiff.parallel.launcher import Place, place_in_any_job
from fastdiff.progress_bar import Bar
from fastdiff.sampling.conditions import Conditions, SampleRequest, conditions
from fastdiff.sampling.npz_parts import NpzParts
from fastdiff.sampling.pixels import IDENTITY, PixelDecoder
from fastdiff.sampling.png_files import PngFiles
from fastdiff.sampling.run import Run
from fastdiff.sampling.shared_set import SharedSet
from fastdiff.sampling.solvers import solver_of

_LATER = "cfg_interval", "coupled_noise", "cfg_norm", "published"
"""Fields of a sampler that are newer than the first plans."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetOptions:
    """Destination and computation of a sample set."""

    out: Path
    """The npz, or the folder."""
    pngs: bool = False
    """Write separate PNG files to the folder ``out``."""
    overwrite: bool = False
    """Replace a finished set in ``out`` that was drawn with other options."""
    batch: int = 64
    """Images per forward pass; part of the plan, because it affects the rounding of matrix products."""
    precision: Precision = "fp32"
    """Precision of the model; the autoencoder computes in fp32."""
    autoencoder: str | None = None
    """See ``PixelDecoder``."""


@dataclass(frozen=True, slots=True)
class PlannedSet:
    """A sample set before it is drawn."""

    run: Run
    conditioned: Conditions
    sampler: SamplerConfig
    options: SetOptions
    decoder: PixelDecoder

    @property
    def plan(self) -> dict[str, Any]:
        """Everything that determines the bytes, except versions and hardware."""
        return _plan(self.run, self.conditioned, self.sampler, self.options, self.decoder)

    def draw(self, place: Place, say: Callable[[str], None] = show) -> None:
        """Draw the missing batches, see ``draw_set``."""
        parts = self._parts()
        if parts.complete:
            say(f"{self.options.out} is complete already")
            return
        with self._drawing(parts):
            while True:
                self._draw_missing(parts, place, parts.batches)
                if not (missing := parts.join()):
                    break
                say(f"rank {place.rank}: waiting for {missing} images that other processes draw")
                parts.wait()
        say(f"{self.options.out}: {self.conditioned.count} images, {self.run.description}")

    def draw_first(self, count: int, place: Place) -> NpzParts:
        """Draw the batches with the first ``count`` images of an npz, which stays unfinished; ``draw`` goes on with it.

        Only rank 0 waits for the batches of others. Errors are those of ``draw_set``.
        """
        parts = self.npz()
        if not parts.complete:
            with self._drawing(parts):
                end = parts.batches_of(count)
                self._draw_missing(parts, place, end)
                while place.rank == 0 and not all(map(parts.has, range(end))):
                    parts.wait()
                    self._draw_missing(parts, place, end)
        return parts

    def npz(self) -> NpzParts:
        """Open the npz, with what has been drawn of it."""
        parts = self._parts()
        assert isinstance(parts, NpzParts), "single files are not drawn in part"
        return parts

    def _parts(self) -> SharedSet:
        options, conditioned = self.options, self.conditioned
        common = options.out, self.plan, (conditioned.count, *self.decoder.shape), options.batch
        if options.pngs:
            return PngFiles(*common, conditioned.kind, overwrite=options.overwrite)
        return NpzParts(*common, conditioned.labels, overwrite=options.overwrite)

    @contextmanager
    def _drawing(self, parts: SharedSet) -> Iterator[None]:
        self.run.model.to(DTYPES[self.options.precision])
        remedy = f"delete {parts.leftovers} and use a smaller --batch, or --precision bf16"
        with reproducible(), _in_memory(self.options.batch, self.run.device, remedy):
            yield

    def _draw_missing(self, parts: SharedSet, place: Place, end: int) -> None:
        """Draw the batches before ``end`` that nobody draws."""
        options = self.options
        try:
            for batch in _missing(parts, place, end):
                index = parts.images(batch)
                parts.write(
                    batch,
                    _draw(
                        self.run, self.conditioned, self.sampler, self.decoder, index, options.batch, options.precision
                    ),
                )
        finally:
            parts.release_all()


def planned(run: Run, request: SampleRequest, sampler: SamplerConfig, options: SetOptions) -> PlannedSet:
    """Resolve the options of a set; the errors are those of ``draw_set``."""
    conditioned, sampler, decoder = _prepared(run, request, sampler, options.precision, options.autoencoder)
    return PlannedSet(run, conditioned, sampler, options, decoder)


def draw_set(
    run: Run,
    request: SampleRequest,
    sampler: SamplerConfig,
    options: SetOptions,
    place: Place | None = None,
    say: Callable[[str], None] = show,
) -> None:
    """Draw the missing batches together with all other processes that do so; the one that completes them joins them.

    All ranks pass the same ``request``, ``sampler`` and ``options``. ``run`` is opened on the rank's device; ``place``
    None: from the environment. ``say`` gets the result in one line. ConfigError: the model does not support the
    request, or another file is at the destination. DataError: the images to enlarge cannot be read. StorageError: the
    images cannot be written.
    """
    place = place or place_in_any_job()
    planned(run, request, sampler, options).draw(place, say)


def draw_in_memory(
    run: Run,
    request: SampleRequest,
    sampler: SamplerConfig,
    *,
    batch: int = 64,
    precision: Precision = "fp32",
    autoencoder: str | None = None,
    progress: bool = True,
) -> npt.NDArray[np.uint8]:
    """Draw images in this process, with the pixels that ``draw_set`` writes.

    Returns:
        ``[N, H, W, C]`` uint8.

    Raises:
        ConfigError: the model does not support the request, or an image is not finite.
        DataError: the images to enlarge cannot be read.
    """
    conditioned, sampler, decoder = _prepared(run, request, sampler, precision, autoencoder)
    drawn = np.empty((conditioned.count, *decoder.shape), np.uint8)
    run.model.to(DTYPES[precision])
    with (
        reproducible(),
        _in_memory(batch, run.device, "draw with a smaller batch, or precision bf16"),
        Bar("sampling", len(drawn), "images", shown=progress) as bar,
    ):
        for first in range(0, len(drawn), batch):
            index = range(first, min(first + batch, len(drawn)))
            drawn[first : index.stop] = _draw(run, conditioned, sampler, decoder, index, batch, precision)
            bar.update(len(index))
    return drawn


def _prepared(
    run: Run, request: SampleRequest, sampler: SamplerConfig, precision: Precision, autoencoder: str | None
) -> tuple[Conditions, SamplerConfig, PixelDecoder]:
    """Return the conditions of the images, the resolved options of the sampler, and the decoder."""
    require_precision(precision, run.device, "--precision")
    asked, sampler = sampler.clip, run.decided(sampler)
    decoder = PixelDecoder(run.config, autoencoder, run.device, run.encoded_by, run.statistics)
    if asked is None:  # the decoder in use decides, not the one of the training data
        sampler = replace(sampler, clip=decoder.name == IDENTITY)
    model = run.config.model
    # A wrong option is told before a file is begun, which the next command would find.
    solver_of(run.config.objective, sampler, (model.channels, model.size, model.size))
    with reproducible():  # for the embeddings of prompts
        return conditions(run, request, sampler.seed), sampler, decoder


def _plan(
    run: Run, conditioned: Conditions, sampler: SamplerConfig, options: SetOptions, decoder: PixelDecoder
) -> dict[str, Any]:
    """Collect everything that determines the bytes, except versions and hardware."""
    how = asdict(sampler)
    if sampler.shift == run.config.time_shift:
        del how["shift"]  # the checkpoint determines it
    for name in [name for name in _LATER if not how[name]]:
        del how[name]  # sets of earlier versions lack it
    return {
        "checkpoint": run.digest,
        "weights": run.description,
        **conditioned.plan,
        **how,
        "steps": sampler.steps if sampler.respacing is None else None,
        "batch": options.batch,
        "precision": options.precision,
        "autoencoder": decoder.digest or decoder.name,
    }


def _missing(parts: SharedSet, place: Place, end: int) -> Iterator[int]:
    """Yield the missing batches before ``end``, claimed; rank 0 shows a progress bar over the images of all ranks."""
    is_shown = place.rank == 0
    total = parts.images(end - 1).stop
    with Bar("sampling", total, "images", done=min(parts.done(), total), shown=is_shown) as bar:
        for batch in filter(parts.claim, in_turn(place.rank, place.size, end)):
            yield batch
            if is_shown:
                bar.update(min(parts.done(), total) - bar.done)


def _draw(
    run: Run,
    conditioned: Conditions,
    sampler: SamplerConfig,
    decoder: PixelDecoder,
    index: range,
    batch: int,
    precision: Precision,
) -> npt.NDArray[np.uint8]:
    """Draw the images of one batch, ``[n, H, W, C]``."""
    latents = run.sample(
        conditioned.of(index), conditioned.null, sampler, first_index=index.start, batch=batch, progress=False
    )
    finite = latents.isfinite().flatten(1).all(1)
    if not finite.all():
        first = index.start + int((~finite).nonzero()[0])
        raise ConfigError(
            f"image {first} is not finite, with the weights of {run.description} in {precision}; use "
            "--precision fp32, other weights (--ema, --step) or more steps",
            everywhere=False,
        )
    return decoder(latents)


@contextmanager
def _in_memory(batch: int, device: torch.device, remedy: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"--batch {batch} needs more memory than {device} has ({str(error).splitlines()[0]}); {remedy}",
            everywhere=False,
        ) from None
