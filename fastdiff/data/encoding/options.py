"""Options of `fastdiff encode` for images, and the device and the cores of an encoding process."""

import os
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import torch

from fastdiff.config.local_paths import require_local
from fastdiff.config.networks.pretrained import HUB_ID
from fastdiff.data.encoding.posterior import Posterior
from fastdiff.data.images.options import SourceOptions
from fastdiff.errors import require
from fastdiff.parallel.devices import select_device, usable_gpus
from fastdiff.parallel.launcher import Place
from fastdiff.tags import Tags

LatentDtype = Literal["float16", "bfloat16", "float32", "int8"]
_OF_PIPELINE = (
    "pretrained",
    "revision",
    "variant",
    "precision",
    "dtype",
    "statistics",
    "posterior",
    "batch",
    "flip",
    "references",
    "reference_column",
    "captions",
    "caption",
    "caption_from",
    "max_tokens",
    "text_dtype",
    "shuffle_tags",
    "drop_tags",
    "tag_separator",
    "keep_tokens",
    "keep_separator",
    "caption_prefix",
    "caption_suffix",
    "seed",
)
"""Options without meaning for a data set in pixel space."""
_OF_TEACHER = ("precision", "batch", "flip")
"""Those of them that a teacher has, too."""


@dataclass(frozen=True, kw_only=True)
class EncodeOptions(SourceOptions):
    """Options of an encode."""

    out: Path
    autoencoder: Literal["pipeline", "identity"] = "pipeline"
    """identity: no autoencoder, a data set in pixel space (RGB in uint8)."""
    pretrained: str = ""
    """Pipeline in diffusers' layout: a folder or a Hugging Face hub id."""
    revision: str | None = None
    variant: str | None = None
    resolution: int = 512
    """Side of the square images in pixels; with buckets, the square root of their largest area."""
    crop: Literal["center", "adm"] = "center"
    interpolation: str = "lanczos"
    buckets: bool = False
    """Resize each image to the bucket of the nearest aspect ratio."""
    bucket_step: int | None = None
    """Step of the bucket sides in pixels; None: 8 latent positions."""
    bucket_sides: tuple[int, int] | None = None
    """Shortest and longest side of buckets in pixels; None: the longer side is at most twice the other."""
    decode: Literal["auto", "dali", "pillow"] = "auto"
    flip: bool = False
    """Also encode every image mirrored."""
    captions: Literal["first", "all"] = "first"
    """all: embed every caption of an image; captions are counted first, without reading the images."""
    max_tokens: int | None = None
    """Tokens of a caption that are read, of text encoders with captions of variable length; None: as the pipeline."""
    shuffle_tags: int | None = None
    """Variants of each caption, whose tags are shuffled; None: captions are embedded as they are."""
    drop_tags: float = 0.0
    """Probability of a tag to be dropped from a variant."""
    tag_separator: str = ","
    keep_tokens: int = 0
    keep_separator: str = ""
    caption_prefix: str = ""
    caption_suffix: str = ""
    """These five: see ``Tags``."""
    seed: int = 0
    """Of the variants."""
    bad: Literal["fail", "skip"] = "fail"
    """Policy for unusable images."""
    batch: int = 16
    """Images or captions per pass through the models."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the autoencoder and the text encoders."""
    dtype: LatentDtype = "float16"
    """Dtype of stored latents and embeddings; float16 for these beside latents in int8."""
    text_dtype: Literal["float16", "float32", "bfloat16", "float8_e4m3fn"] | None = None
    """Dtype of stored embeddings; None: ``dtype``."""
    statistics: str | None = None
    """How latents become x0: ``own``: by the shift and scale of the autoencoder; ``measured``: by those of the encoded
    images; or a path, of a data set or of a file of statistics. None: own if the autoencoder has any, else measured."""
    posterior: Posterior = "each-step"
    """What is stored of a posterior, see ``data.encoding.posterior``."""
    teacher: str = ""
    """Vision model whose patch features are stored (``models.encoders.teacher``): a folder, or an id of the hub."""
    teacher_side: int | None = None
    """Its features per side of an image, as many as the network has patches; None: half of the positions of a latent,
    for patches of 2."""
    teacher_width: int | None = None
    """Components of a stored feature; 0: all of the teacher; None: at most 64."""
    teacher_basis: str = ""
    """Data set whose map reduces the features; empty: a map of their own is fitted."""
    teacher_token: bool = False
    """Store its class token, too."""
    workers: int = 4
    """Decoding threads per rank."""

    @property
    def in_pixels(self) -> bool:
        """Whether the data set holds pixels instead of latents."""
        return self.autoencoder == "identity"

    @property
    def needs_captions(self) -> bool:
        """Whether captions are read, and an image without one is unusable."""
        return not self.in_pixels

    @property
    def tags(self) -> Tags:
        """How the embedded variants of a caption are made."""
        return replace(Tags.of(self), shuffle_tags=self.shuffle_tags is not None)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_local("--pretrained", self.pretrained)
        self._require_teacher()
        if self.in_pixels:
            taken = _OF_TEACHER if self.teacher else ()
            changed = [
                f.name
                for f in fields(self)
                if f.name in _OF_PIPELINE and f.name not in taken and getattr(self, f.name) != f.default
            ]
            flag = "--" + changed[0].replace("_", "-") if changed else ""
            mirror = "; training mirrors pixels with --data.random_flip" if flag == "--flip" else ""
            require(not changed, f"{flag} needs a pipeline, but --autoencoder identity has none; omit it{mirror}")
        else:
            require(
                bool(self.pretrained),
                f"--pretrained is missing; give the pipeline whose autoencoder encodes {self.source}, or use "
                "--autoencoder identity for a data set in pixel space (the sources digits and synthetic need neither)",
            )
            require(  # before the source is opened, which may be on the hub
                os.path.isdir(self.pretrained) or re.fullmatch(HUB_ID, self.pretrained) is not None,
                f"--pretrained {self.pretrained}: neither a folder on this machine nor an id of the Hugging Face hub, "
                "such as stabilityai/sd-vae-ft-ema; check the path",
            )
        require(
            self.batch >= 1 and self.workers >= 1,
            f"--batch {self.batch}, --workers {self.workers}: expected at least 1",
        )
        self._require_variants()
        require(self.bucket_step is None or self.buckets, "--bucket-step needs --buckets; add it or omit --bucket-step")
        require(
            self.bucket_sides is None or self.buckets, "--bucket-sides needs --buckets; add it or omit --bucket-sides"
        )
        # resolve() fails on a link in a circle, which the reader explains.
        source, out = (Path(os.path.realpath(path)) for path in (self.source, self.out))
        require(source not in (out, *out.parents), f"{out} is inside the source {source}; choose another folder")

    def _require_teacher(self) -> None:
        names = ("teacher_side", "teacher_width", "teacher_basis", "teacher_token")
        changed = [f.name for f in fields(self) if f.name in names and getattr(self, f.name) != f.default]
        flag = "--" + changed[0].replace("_", "-") if changed else ""
        require(bool(self.teacher) or not changed, f"{flag} needs --teacher, the vision model; name it, or omit {flag}")
        require(
            not (self.teacher and self.buckets),
            "--teacher with --buckets: its features are those of square images of one size; leave one of them out",
        )
        require(self.teacher_side is None or self.teacher_side >= 1, f"--teacher-side {self.teacher_side}: at least 1")
        width = self.teacher_width
        require(width is None or width >= 0, f"--teacher-width {width}: at least 1, or 0 for all")
        require_local("--teacher-basis", self.teacher_basis)

    def _require_variants(self) -> None:
        variants = self.shuffle_tags
        require(variants is None or variants >= 1, f"--shuffle-tags {variants}: a number of variants, at least 1")
        require(
            variants is not None or not self.drop_tags,
            f"--drop-tags {self.drop_tags:g} needs --shuffle-tags K, the number of variants of a caption to encode",
        )
        require(variants is not None or not self.seed, f"--seed {self.seed} has no effect without --shuffle-tags")
        self.tags.require_consistent(lambda field: "--" + field.replace("_", "-"))


def device_of(place: Place) -> torch.device:
    """Select and return the GPU of a process, which several may share, or the CPU; ConfigError: torch cannot use it."""
    return select_device(local_rank=place.local_rank % max(1, usable_gpus()))


def cores_of(place: Place) -> int:
    """Return the share of a process of the cores of this machine."""
    return max(1, len(os.sched_getaffinity(0)) // place.local_size)
