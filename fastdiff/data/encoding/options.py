"""What `fastdiff encode` is asked for, and which of the processes that do it this one is."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import torch

from fastdiff.data.images.items import ClassesFrom
from fastdiff.data.shards.format import MAX_SHARD_SAMPLES
from fastdiff.errors import ConfigError, require

_OF_PIPELINE = ("pretrained", "revision", "variant", "precision", "dtype", "batch", "flip", "captions")
"""Fields that say nothing about pixels."""


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """What to encode, and how."""

    source: str
    """See ``image_sources.open_source``."""
    out: Path
    autoencoder: Literal["pipeline", "identity"] = "pipeline"
    """identity: none, a data set in pixel space: RGB in uint8."""
    pretrained: str = ""
    """Pipeline in diffusers' layout: a folder, or an id on the Hugging Face hub."""
    revision: str | None = None
    variant: str | None = None
    resolution: int = 512
    """Side of the square images, or with buckets the root of their largest area, in pixels."""
    crop: Literal["center", "adm"] = "center"
    interpolation: str = "lanczos"
    buckets: bool = False
    """Keep the aspect ratio, as far as there is a bucket for it."""
    bucket_step: int | None = None
    """What the sides of buckets are multiples of, in pixels; None: 8 positions of a latent."""
    decode: Literal["auto", "dali", "pillow"] = "auto"
    flip: bool = False
    """Also encode every image mirrored."""
    captions: Literal["first", "all"] = "first"
    """all: every caption of an image is embedded; they are counted at the start, without reading the images."""
    bad: Literal["fail", "skip"] = "fail"
    """What becomes of images that cannot be used."""
    classes_from: ClassesFrom = "auto"
    image_column: str = "image"
    caption_column: str = "text"
    split: str = "train"
    max_samples: int | None = None
    samples_per_shard: int = 1024
    batch: int = 16
    """Images, and captions, per pass through the models."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the autoencoder and the text encoders."""
    dtype: Literal["float16", "float32"] = "float16"
    """Of what is stored."""
    workers: int = 4
    """Threads that decode, per rank."""

    def __post_init__(self) -> None:
        if self.autoencoder == "identity":
            changed = [f.name for f in fields(self) if f.name in _OF_PIPELINE and getattr(self, f.name) != f.default]
            flag = "--" + changed[0].replace("_", "-") if changed else ""
            mirror = "; pixels are mirrored by the training, with --data.random_flip" if flag == "--flip" else ""
            require(not changed, f"{flag} is for a pipeline, and --autoencoder identity has none; leave it out{mirror}")
        else:
            require(
                bool(self.pretrained),
                f"--pretrained is missing: the pipeline whose autoencoder encodes {self.source}; for a data set in "
                "pixel space use --autoencoder identity (the sources digits and synthetic need neither)",
            )
        require(
            1 <= self.samples_per_shard <= MAX_SHARD_SAMPLES,
            f"--samples-per-shard {self.samples_per_shard}: from 1 to {MAX_SHARD_SAMPLES}",
        )
        require(self.batch >= 1 and self.workers >= 1, f"--batch {self.batch}, --workers {self.workers}: at least 1")
        require(self.bucket_step is None or self.buckets, "--bucket-step is the step of --buckets, which is missing")
        source, out = Path(self.source).resolve(), self.out.resolve()
        require(source not in (out, *out.parents), f"{out} lies in the source {source}; choose another folder")


@dataclass(frozen=True)
class Rank:
    """This process among those that encode the same source into the same folder."""

    number: int = 0
    ranks: int = 1
    local: int = 0
    """Its number on this machine, which chooses the GPU."""

    @classmethod
    def from_environment(cls) -> Rank:
        """What torchrun or deepspeed (RANK, WORLD_SIZE, LOCAL_RANK), or else srun, says."""
        found = os.environ
        if "RANK" in found:
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        elif "SLURM_STEP_ID" in found:  # in a batch script outside of srun the others are set all the same
            names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
        else:
            return cls()
        try:
            number, ranks, local = (int(found.get(name, default)) for name, default in zip(names, "010", strict=True))
        except ValueError as error:
            raise ConfigError(f"{', '.join(names)}: {error}; expected whole numbers") from None
        require(0 <= number < ranks, f"{names[0]} is {number} and {names[1]} is {ranks}: expected a number below that")
        return cls(number, ranks, local)

    def device(self) -> torch.device:
        """The GPU of this process, or the CPU."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        device = torch.device("cuda", self.local % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device

    def cores(self) -> int:
        """How many cores this process may use beside the others on this machine."""
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
        return max(1, len(os.sched_getaffinity(0)) // ranks)
