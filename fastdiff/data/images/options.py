"""Options of a source of images, their checks, and which kinds of sources read them."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastdiff.config.local_paths import require_local
from fastdiff.data.shards.format import MAX_SHARD_SAMPLES
from fastdiff.data.shards.remote import is_remote, shown
from fastdiff.errors import require
from fastdiff.sanitize import escape

ClassesFrom = Literal["auto", "folder", "prefix", "none"]
"""Origin of the classes, see ``ImageFolder``."""
CaptionFrom = Literal["none", "folder"]
"""Origin of the captions of images that have none, see ``ImageFolder``."""
Kind = Literal["code", "tars", "table", "folder", "rows"]
"""Code of the user, tars, a file of metadata, a folder of images, or a data set of Hugging Face."""


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """A source of images, and what of it is read."""

    source: str
    """As the user named it, see ``sources.open_source``."""
    samples_per_shard: int = 1024
    """Images per partition; a tar is always one partition."""
    image_column: str = "image"
    """Column of the images in a data set, or of their paths in a file of metadata."""
    caption_column: str = "text"
    """Column or field of the captions."""
    split: str = "train"
    """Name of the split, if there are several."""
    max_samples: int | None = None
    """Use only the first samples, up to this number."""
    classes_from: ClassesFrom = "auto"
    image_root: str = ""
    """Folder of the images of a file of metadata; empty: the folder of the file."""
    dataset_config: str | None = None
    """Configuration of a data set that has several."""
    references: str = ""
    """Folder of the pictures that each image refers to, see ``references.py``; empty: none, or those of a column."""
    reference_column: str = ""
    """Column of a file of metadata, or of a data set, with the reference of each image, or a list of them."""
    caption: str = ""
    """Caption of each image without one of its own; empty: none."""
    caption_from: CaptionFrom = "none"
    """folder: the name of its folder is the caption of each image without one of its own."""
    masks: str = ""
    """Folder of masks of the loss, or ``alpha``, see ``masks.py``; empty: none."""
    caption_extension: str = ""
    """Ending of caption files, such as .txt; empty: those of ``caption_files``."""
    directly: bool = False
    """Whether images in subfolders are left out."""

    def __post_init__(self) -> None:
        per_shard, most = self.samples_per_shard, self.max_samples
        require(
            1 <= per_shard <= MAX_SHARD_SAMPLES, f"--samples-per-shard {per_shard}: expected 1 to {MAX_SHARD_SAMPLES}"
        )
        require(most is None or most >= 1, f"--max-samples {most}: expected at least 1")
        require(
            not self.caption or self.caption_from == "none",
            f"--caption and --caption-from {self.caption_from} both give the caption of images without one; omit one",
        )
        require(
            re.fullmatch(r"(\.[A-Za-z0-9_]+)?", self.caption_extension) is not None,
            f"--caption-extension {self.caption_extension}: expected an ending such as .txt",
        )
        flag = "--caption" if self.caption else "--caption-from"
        require(
            self.classes_from == "auto" or (not self.caption and self.caption_from == "none"),
            f"{flag} needs captions, which --classes-from {self.classes_from} ignores; omit one",
        )

    @property
    def needs_captions(self) -> bool:
        """Whether captions are read, and an image without one is unusable."""
        return True

    @property
    def name(self) -> str:
        """Name of the source for messages and the provenance, without secrets."""
        return shown(self.source) if is_remote(self.source) else escape(self.source)

    @property
    def mask_folder(self) -> Path | None:
        """Folder of masks of the loss, if they are files."""
        return Path(self.masks) if self.masks not in ("", "alpha") else None

    def require_read(self, kind: Kind) -> None:
        """Raise ConfigError for options that such sources do not read, or an ``image_root`` that is no folder here."""
        require_local("--image-root", self.image_root)
        require_local("--references", self.references)
        require_local("--masks", self.masks)
        require(
            self.mask_folder is None or kind in ("table", "folder"),
            f"--masks {self.masks}: mask files belong to the pictures of a folder, which {self.name} is not; the masks "
            "of other sources are the alpha channels of the pictures: --masks alpha",
        )
        for name, (readers, why) in _READERS.items():
            value, flag = getattr(self, name), name.replace("_", "-")
            unused = kind not in readers and value != SourceOptions.__dataclass_fields__[name].default
            require(not (unused and kind == "code"), f"{self.name} is code, which reads its images and captions itself")
            require(not unused, f"--{flag} {value} {why.format(self.name)}")
        require(
            not self.image_root or Path(self.image_root).is_dir(), f"--image-root {self.image_root}: no such folder"
        )


_READERS: dict[str, tuple[tuple[Kind, ...], str]] = {
    "image_root": (
        ("table",),
        "is for a file of metadata (.json, .jsonl or .csv), which the source is not; leave it out",
    ),
    "dataset_config": (("rows",), "is for a data set of Hugging Face, which the source is not; leave it out"),
    "references": (
        ("table", "folder"),
        "is a folder beside a folder of images or a file of metadata, which the source is not; leave it out",
    ),
    "reference_column": (
        ("table", "folder", "rows"),
        "is for a file of metadata or a data set of Hugging Face; leave it out",
    ),
    "caption": (("tars", "table", "folder", "rows"), "is not read"),
    "caption_from": (("table", "folder"), "needs a folder of images; use --caption TEXT"),
    "caption_extension": (("folder",), "needs a folder of images with caption files; leave it out"),
    "classes_from": (
        ("folder",),
        "needs a folder of images, which {} is not; omit it: tars and data sets contain their classes",
    ),
}
"""Kinds of sources that read an option, and what to say where it is given for another one."""
