"""Training samples and validation, as frozen dataclasses. This module imports no torch."""

import math
from dataclasses import dataclass, fields
from typing import Literal

from fastdiff.config.data_sets import DataSet, is_list, parse_sets
from fastdiff.config.local_paths import require_local
from fastdiff.errors import require
from fastdiff.sanitize import address
from fastdiff.tags import Tags

MOST_WORKERS = 1024
"""Largest number of decoding threads per rank."""
_ONLINE = (
    "image_column", "caption_column", "image_root", "dataset_config", "max_samples", "subset", "masks",
    "resolution", "center_crop", "image_interpolation_mode", "decode", "workers", "shuffle_tags", "tag_separator",
    "keep_tokens", "keep_separator", "drop_tags", "caption_prefix", "caption_suffix",
)  # fmt: skip
"""Fields that only online encoding reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Source and order of the training samples."""

    path: str = ""
    """Folder of latent shards written by `fastdiff encode`, also at http(s):// or s3://. With --data.online: the
    images, as a folder, WebDataset shards or a Hugging Face dataset."""
    sets: tuple[str, ...] = ()
    """Several data sets in place of --data.path, each as
    [NAME=]PATH[:REPEATS][:weight=W][:loss_weight=W][:condition_dropout=P]: an epoch holds each sample REPEATS times
    (1), or as many samples of each data set as its weight says; loss_weight multiplies the loss, as for the class
    pictures of prior preservation; condition_dropout goes before that of --objective."""
    cache: str = ""
    """Cache folder for the shards of a remote --data.path. Default: ~/.cache/fastdiff/shards."""
    autoencoder: str | None = None
    """Autoencoder that decodes what is drawn: a folder, a Hugging Face id, or identity for pixels. Default: that of
    --pretrained.path, otherwise the one that the data set records; a run keeps it, so the data need not be there when
    samples are drawn or exported."""
    random_flip: bool = False
    """Mirror half of the images; the shards must contain pixels, or also the mirrored latents (`fastdiff encode
    --flip`)."""
    shuffle_shards: int = 16
    """Samples are shuffled inside windows of this many (shuffled) shards."""
    loader: Literal["auto", "dali", "prefetch"] = "auto"
    """auto: DALI if it loads and works here, otherwise the pinned-memory prefetcher; both give the same batches."""
    prefetch: int = 4
    """Number of micro-batches to read ahead."""
    damaged: Literal["fail", "skip"] = "fail"
    """Handling of a damaged sample. fail: end the run. skip: replace it by an intact sample of the same shard and log
    it in damaged.jsonl; the run ends if more than 0.1 % of the samples seen, and at least 10, were replaced."""
    online: bool = False
    """Read images and encode them with the frozen autoencoder and text encoder of --pretrained.path in every step. Only
    this mode uses the fields below; `fastdiff encode` has its own flags for them."""
    image_column: str = "image"
    """Image column of a Hugging Face dataset."""
    caption_column: str = "text"
    """Caption column of a Hugging Face dataset or of metadata.jsonl: one caption or a list of captions."""
    image_root: str = ""
    """Folder of the images if --data.path is a file of metadata (.json with a list, .jsonl or .csv); default: that of
    the file."""
    dataset_config: str | None = None
    """Configuration of a Hugging Face dataset that has several."""
    max_samples: int | None = None
    """Use only this many images."""
    subset: Literal["first", "random"] = "first"
    """Which images --data.max_samples uses: the first, or others drawn by --seed."""
    masks: str = ""
    """Masks of the loss: a folder with a mask per picture, or alpha, the alpha channel of each (`fastdiff encode
    --masks`). Empty: none."""
    resolution: int = 512
    """Height and width of the images after resizing the shorter side and cropping, in pixels."""
    center_crop: bool = False
    """Crop the centre instead of a random region."""
    image_interpolation_mode: Literal[
        "nearest", "nearest_exact", "bilinear", "bicubic", "box", "hamming", "lanczos"
    ] = "lanczos"
    """Interpolation filter of the resizing."""
    decode: Literal["auto", "dali", "pillow"] = "auto"
    """Library that decodes and resizes the images; auto: DALI if it works here; pillow is the exact reference."""
    workers: int = 4
    """Image decoding threads per rank."""
    shuffle_tags: bool = False
    """Shuffle the tags of the caption, anew in every draw (kohya's shuffle_caption)."""
    tag_separator: str = ","
    """What stands between two tags; they are joined by a comma and a blank."""
    keep_tokens: int = 0
    """First tags that are neither shuffled nor dropped, those of the prefix included."""
    keep_separator: str = ""
    """Mark behind the tags that are kept, instead of their number, as ||| in: sks, dog ||| red, small; the tags behind
    a second one are kept at the end."""
    drop_tags: float = 0.0
    """Drop each other tag with this probability (kohya's caption_tag_dropout_rate)."""
    caption_prefix: str = ""
    """Text before each caption, and shuffled with its tags unless they are kept."""
    caption_suffix: str = ""
    """Text behind each caption, and shuffled with its tags."""

    @property
    def tags(self) -> Tags:
        """How online encoding makes a text of a caption."""
        return Tags.of(self)

    def __post_init__(self) -> None:
        parse_sets(self.sets)
        require(not (self.sets and self.path), "--data.path and --data.sets both name the data; give one of them")
        require(
            not (self.sets and self.online),
            "--data.online reads one source of images; encode each with `fastdiff encode` and leave --data.online out",
        )
        require_local("--data.cache", self.cache)
        require_local("--data.autoencoder", self.autoencoder or "")
        require(self.resolution >= 8, f"--data.resolution {self.resolution}: at least 8")
        require(1 <= self.workers <= MOST_WORKERS, f"--data.workers {self.workers}: 1 to {MOST_WORKERS}")
        require(self.max_samples is None or self.max_samples >= 1, f"--data.max_samples {self.max_samples}: at least 1")
        require(self.subset == "first" or self.max_samples is not None, "--data.subset random needs --data.max_samples")
        changed = [f.name for f in fields(self) if f.name in _ONLINE and getattr(self, f.name) != f.default]
        require(
            self.online or not changed,
            f"--data.{changed[0] if changed else ''} is for --data.online; for shards, set it in `fastdiff encode`",
        )
        require(
            not (self.online and self.damaged == "skip"),
            "--data.damaged skip is for shards; remove bad images from the source, or encode with `--bad skip`",
        )
        self.tags.require_consistent("--data.{}".format)
        require(self.shuffle_shards >= 1, f"--data.shuffle_shards {self.shuffle_shards}: at least 1")
        require(self.prefetch >= 1, f"--data.prefetch {self.prefetch}: at least 1")

    @property
    def entries(self) -> tuple[DataSet, ...]:
        """The data sets; empty: none is named."""
        return parse_sets(self.sets) or ((DataSet(path=self.path),) if self.path else ())

    @property
    def is_joined(self) -> bool:
        """Whether the data are several data sets, by ``sets`` or by a folder with ``sets.json``."""
        return bool(self.sets) or (not self.online and is_list(self.path))

    @property
    def described(self) -> str:
        """The paths of the data, for messages."""
        return ", ".join(address(each.path) for each in self.entries)


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationConfig:
    """Validation loss and sample images, computed with the averaged weights during the training."""

    data: str = ""
    """Folder of held-out latent shards, also at http(s):// or s3://. Their loss, under noise that is the same in every
    run, is written to validation.jsonl. Empty: no validation loss."""
    samples: int = 1024
    """Number of held-out samples to use, spread evenly over the data; all if there are fewer."""
    prompts: tuple[str, ...] = ()
    """Prompts of the sample images; empty: see --validation.captions."""
    captions: int = 0
    """Number of captions of the training data that are drawn if there are no prompts; 0: no images. Images for online
    encoding have none to take."""
    references: tuple[str, ...] = ()
    """Pictures that the prompts refer to, for edit models: as many files as each picture of the data has references,
    for all prompts, or as many for each prompt in their order. Empty: captions of the data have those of their
    pictures, --validation.prompts have none."""
    every: int = 1000
    """Optimizer steps between validations (loss and prompts), in addition to one at the end. 0: never."""
    first: int | None = None
    """Optimizer step of the first validation. None: as many as between two."""
    images_per_prompt: int = 4
    """Images per prompt."""
    steps: int | None = None
    """Denoising steps. None: for a fine-tuned network --sampling.steps, or those of its pipeline; otherwise 20, by
    --sampling.scheduler or DPM-Solver++."""
    guidance_scale: float | None = None
    """Classifier-free guidance scale; 1: none. None: --sampling.cfg, or that of the pipeline of a fine-tuned network;
    otherwise 7.5."""

    def __post_init__(self) -> None:
        counts = (("samples", 1), ("captions", 0), ("every", 0), ("images_per_prompt", 1))
        for name, least in counts:
            require(getattr(self, name) >= least, f"--validation.{name} {getattr(self, name)}: at least {least}")
        for path in self.references:
            require_local("--validation.references", path)
        require(
            not self.references or bool(self.prompts or self.captions),
            "--validation.references needs --validation.prompts or --validation.captions, which refer to them",
        )
        require(self.steps is None or self.steps >= 1, f"--validation.steps {self.steps}: at least 1")
        require(self.first is None or self.first >= 1, f"--validation.first {self.first}: at least 1, or None")
        require(self.first is None or self.every > 0, f"--validation.first {self.first} needs --validation.every")
        require(
            self.every > 0 or not self.data,
            f"--validation.data {self.data} with --validation.every 0 is never read; set --validation.every to the "
            "optimizer steps between two validations, for example 1000",
        )
        require(
            self.guidance_scale is None or math.isfinite(self.guidance_scale),
            f"--validation.guidance_scale {self.guidance_scale}: a finite number",
        )

    @property
    def draws_prompts(self) -> bool:
        """Whether images are drawn, of the prompts or of captions."""
        return bool(self.prompts or self.captions) and self.every > 0
