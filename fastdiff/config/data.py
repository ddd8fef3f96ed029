"""Where the samples of a run come from, as a frozen dataclass. This module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from fastdiff.errors import require

_ONLINE = (
    "image_column", "caption_column", "max_samples", "resolution", "center_crop", "image_interpolation_mode", "decode",
    "workers",
)  # fmt: skip
"""Fields that nothing but online encoding reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the latents come from and in which order they are seen."""

    path: str = ""
    """Folder of latent shards, as written by `fastdiff encode`, also at http(s):// or s3://; with --data.online, the
    images: a folder, WebDataset shards or a Hugging Face dataset."""
    cache: str = ""
    """Folder for the shards of a --data.path that is not on this machine. Default: ~/.cache/fastdiff/shards."""
    random_flip: bool = False
    """Mirror half of the images; shards must hold pixels, or the mirrored latents too (`fastdiff encode --flip`)."""
    shuffle_shards: int = 16
    """Samples are shuffled inside windows of this many (shuffled) shards."""
    loader: Literal["auto", "dali", "prefetch"] = "auto"
    """auto: DALI where it is installed, else the plain pinned-memory prefetcher; the batches are the same."""
    prefetch: int = 4
    """Micro-batches that are read ahead."""
    damaged: Literal["fail", "skip"] = "fail"
    """What a damaged sample does to the run: end it, or be replaced by an intact one of its shard, which is logged in
    damaged.jsonl; the run ends if more than 0.1 % of the samples seen, and at least 10, were replaced."""
    online: bool = False
    """Read images and encode them with the frozen autoencoder and text encoder of --pretrained.path in every step. The
    fields below are for this only; `fastdiff encode` has them as its own flags."""
    image_column: str = "image"
    """Column of a Hugging Face dataset with the images."""
    caption_column: str = "text"
    """Column of a Hugging Face dataset, or of metadata.jsonl, with a caption or a list of captions."""
    max_samples: int | None = None
    """Use only this many of the images, the first ones."""
    resolution: int = 512
    """Height and width of the images after resizing the shorter side and cropping, in pixels."""
    center_crop: bool = False
    """Crop the middle instead of a random part."""
    image_interpolation_mode: Literal[
        "nearest", "nearest_exact", "bilinear", "bicubic", "box", "hamming", "lanczos"
    ] = "lanczos"
    """Filter of the resizing."""
    decode: Literal["auto", "dali", "pillow"] = "auto"
    """Who decodes and resizes the images; pillow is the exact reference."""
    workers: int = 4
    """Threads that decode images, per rank."""

    def __post_init__(self) -> None:
        require(self.resolution >= 8, f"--data.resolution {self.resolution}: at least 8")
        require(self.workers >= 1, f"--data.workers {self.workers}: at least 1")
        require(self.max_samples is None or self.max_samples >= 1, f"--data.max_samples {self.max_samples}: at least 1")
        changed = [f.name for f in fields(self) if f.name in _ONLINE and getattr(self, f.name) != f.default]
        require(
            self.online or not changed,
            f"--data.{changed[0] if changed else ''} is for --data.online; shards have what `fastdiff encode` was told",
        )
        require(
            not (self.online and self.damaged == "skip"),
            "--data.damaged skip is for shards; take bad images out of the source, or encode with `--bad skip`",
        )
        require(self.shuffle_shards >= 1, f"--data.shuffle_shards {self.shuffle_shards}: at least 1")
        require(self.prefetch >= 1, f"--data.prefetch {self.prefetch}: at least 1")
