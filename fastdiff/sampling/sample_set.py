"""``fastdiff sample RUN --npz OUT``: a set of samples of any size, drawn by any number of processes.

The images are drawn in batches of one size, whose borders are a function of the number of images alone; rank r of W
draws the batches r, r + W, ... Every rank computes an image by the same operations on the same numbers. The file is
therefore the same, byte by byte, for every W and after every kill, on machines with the same hardware and libraries.
The ranks do not wait for one another, and communicate only through ``parts.SampleParts``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from fastdiff.config.sampler import SamplerConfig
from fastdiff.data.encoding.autoencoder import reproducible
from fastdiff.data.encoding.options import Rank
from fastdiff.errors import ConfigError
from fastdiff.models.kernel_choice import DTYPES
from fastdiff.parallel.devices import require_precision
from fastdiff.sampling.conditions import Conditions, SampleRequest, conditions
from fastdiff.sampling.parts import SampleParts
from fastdiff.sampling.pixels import IDENTITY, PixelDecoder
from fastdiff.sampling.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class SetOptions:
    """Destination and computation of a sample set."""

    out: Path
    """The npz."""
    batch: int = 64
    """Images per forward pass; part of the plan, because it affects the rounding of matrix products."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the model; the autoencoder computes in fp32."""
    autoencoder: str | None = None
    """See ``PixelDecoder``."""


def draw_set(
    run: Run,
    request: SampleRequest,
    sampler: SamplerConfig,
    options: SetOptions,
    rank: Rank | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Draw the missing batches of this rank; the rank that completes the set writes the npz.

    All ranks pass the same ``request``, ``sampler`` and ``options``.

    Args:
        run: opened on the rank's device.
        request: the requested content.
        sampler: solver, steps, guidance and seed.
        options: destination and computation.
        rank: number of this process; None: from the environment.
        say: called with the result in one line.

    Raises:
        ConfigError: the model does not support the request, or another file is at the destination.
        DataError: the images to enlarge cannot be read.
        StorageError: the images cannot be written.
    """
    rank = rank or Rank.from_environment()
    require_precision(options.precision, run.device, "--precision")
    asked, sampler = sampler.clip, run.decided(sampler)
    decoder = PixelDecoder(run.config, options.autoencoder, run.device)
    if asked is None:  # the decoder in use decides, not the one of the training data
        sampler = replace(sampler, clip=decoder.name == IDENTITY)
    with reproducible():  # for the embeddings of prompts
        conditioned = conditions(run, request, sampler.seed)
    plan = _plan(run, conditioned, sampler, options, decoder)
    shape = (conditioned.count, *decoder.shape)
    parts = SampleParts(options.out, plan, shape, options.batch, conditioned.labels)
    if parts.complete:
        say(f"{options.out} is complete already")
        return
    run.model.to(DTYPES[options.precision])
    with reproducible(), _enough_memory(options, run.device):
        for batch in _missing(parts, rank):
            parts.write(batch, _draw(run, conditioned, sampler, decoder, parts.images(batch), options))
    if missing := parts.join():
        say(
            f"rank {rank.number}: its share is done; {missing} images of other ranks are still missing; if all ranks "
            "have ended, run this command once more"
        )
    else:
        say(f"{options.out}: {conditioned.count} images, {run.description}")


def _plan(
    run: Run, conditioned: Conditions, sampler: SamplerConfig, options: SetOptions, decoder: PixelDecoder
) -> dict[str, Any]:
    """Collect everything that determines the bytes, except versions and hardware."""
    how = asdict(sampler)
    if sampler.shift == run.config.timesteps.shift:
        del how["shift"]  # the checkpoint determines it
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


def _missing(parts: SampleParts, rank: Rank) -> Iterator[int]:
    """Yield the missing batches of a rank; rank 0 shows a progress bar over the images of all ranks."""
    hidden = None if rank.number == 0 else True
    with tqdm(desc="sampling", total=parts.total, initial=parts.done(), unit="image", disable=hidden) as bar:
        for batch in range(rank.number, parts.batches, rank.ranks):
            if parts.has(batch):
                continue
            yield batch
            if not bar.disable:
                bar.update(parts.done() - bar.n)  # counts the images of all ranks


def _draw(
    run: Run,
    conditioned: Conditions,
    sampler: SamplerConfig,
    decoder: PixelDecoder,
    index: range,
    options: SetOptions,
) -> npt.NDArray[np.uint8]:
    """Draw the images of one batch, ``[n, H, W, C]``."""
    latents = run.sample(
        conditioned.of(index), conditioned.null, sampler, first_index=index.start, batch=options.batch, progress=False
    )
    finite = latents.isfinite().flatten(1).all(1)
    if not finite.all():
        first = index.start + int((~finite).nonzero()[0])
        raise ConfigError(
            f"image {first} is not finite, with the weights of {run.description} in {options.precision}; use "
            "--precision fp32, other weights (--ema, --step) or more steps",
            everywhere=False,
        )
    return decoder(latents)


@contextmanager
def _enough_memory(options: SetOptions, device: torch.device) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"--batch {options.batch} needs more memory than {device} has ({str(error).splitlines()[0]}); delete "
            f"{options.out}.parts and use a smaller --batch, or --precision bf16",
            everywhere=False,
        ) from None
