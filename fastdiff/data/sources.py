"""Where samples come from: each source is a generator of ``Sample``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

DIGITS_SOURCE = "scikit-learn load_digits"
"""What the provenance of the encoded digits begins with; the evaluation knows them by it."""
DIGITS_SPLITS = {"all": slice(0, 1797), "train": slice(0, 1415), "test": slice(1415, 1797)}
"""Parts of the scans. They lie form by form, as they were filled in, and one begins at 1415: none is in both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One sample on its way into a shard."""

    key: str
    """Letters, digits, ``_`` and ``-``."""
    latent: npt.NDArray[Any]
    """``[C, H, W]`` float16 or float32."""
    label: int | None = None
    """Class; None for unconditional data."""
    meta: dict[str, Any] = field(default_factory=dict)
    """What else is known about the sample, for ``<key>.json``; empty: no such file."""


def digits_source(split: str) -> str:
    """What the provenance of a split says."""
    return DIGITS_SOURCE if split == "all" else f"{DIGITS_SOURCE}, {split}"


def digits(split: str = "all") -> Iterator[Sample]:
    """The 1,797 scans of handwritten digits that come with scikit-learn.

    Args:
        split: of ``DIGITS_SPLITS``.

    Yields:
        Samples with a latent ``[1, 8, 8]`` float16 in [-1, 1] (pixel / 8 - 1, exact in float16) and its class
        0-9.
    """
    from sklearn.datasets import load_digits  # seconds to import

    scans = load_digits()
    latents = (scans.images / 8 - 1).astype(np.float16)[:, None]
    chosen = DIGITS_SPLITS[split]
    for number in range(len(latents))[chosen]:
        latent, label = latents[number], scans.target[number]
        yield Sample(key=f"{number:09d}", latent=latent, label=int(label))


def synthetic(shape: tuple[int, int, int], samples: int, classes: int, seed: int) -> Iterator[Sample]:
    """Standard normal noise with random classes, for benchmarks; the same for the same arguments.

    Args:
        shape: ``(C, H, W)``.
        samples: How many.
        classes: Classes are drawn from [0, classes).
        seed: Any integer from 0.

    Yields:
        Samples with a latent of this shape, float16.
    """
    generator = np.random.Generator(np.random.Philox(seed))
    for number in range(samples):
        latent = generator.standard_normal(shape, dtype=np.float32).astype(np.float16)
        yield Sample(key=f"{number:09d}", latent=latent, label=int(generator.integers(classes)))
