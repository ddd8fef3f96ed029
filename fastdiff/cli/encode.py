"""``fastdiff encode``: write latent shards."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdiff.config.arguments.types import (
    Subcommands,
    at_most,
    count,
    count_or_zero,
    local_path,
    positive,
    seed,
    shape,
)
from fastdiff.config.sections.data import MOST_WORKERS
from fastdiff.console import show
from fastdiff.errors import ConfigError, FastdiffError, Preempted, require
from fastdiff.live_line import live_line

if TYPE_CHECKING:
    from fastdiff.data.kohya.parts import Parts

_OF_KOHYA = ("layout", "regularisation", "prior_loss_weight")
"""Options that say which data sets a source stands for."""
_BUILTIN = {"digits": ("split",), "synthetic": ("shape", "samples", "classes")}
"""Built-in sources, with their options."""


def add(commands: Subcommands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "encode",
        help="write latent shards",
        description="Encode images into latent shards with the autoencoder and the text encoder of a pipeline, or into "
        "shards of pixels. Run it on many GPUs with torchrun, deepspeed --no_python --no_local_rank, or srun. After a "
        "kill, the same command resumes.",
        # Options that are not given stay absent: the called functions have the defaults, and options of another kind of
        # source are detected.
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="images: a folder (with metadata.jsonl or .csv, a caption file beside each, one folder per class, or none "
        "of these), a file of metadata (.json with a list, .jsonl or .csv), WebDataset tars (path or address, braces "
        "allowed), or a Hugging Face dataset; or PATH.py:NAME, code of yours, which is executed (docs/api.md); or "
        "digits (scikit-learn's 1,797 real scans) or synthetic, which take no --pretrained",
    )
    parser.add_argument("out", type=local_path, metavar="OUT", help="folder to write; must not hold a data set yet")
    _add_pipeline(parser)
    _add_teacher(parser)
    _add_images(parser)
    _add_captions(parser)
    _add_work(parser)
    _add_kohya(parser)
    group = parser.add_argument_group("synthetic")
    group.add_argument("--shape", type=shape, metavar="C,H,W", help="latent shape")
    group.add_argument("--samples", type=count, help="number of samples")
    group.add_argument("--classes", type=count, help="number of classes")
    parser.set_defaults(run=_encode)


def _add_pipeline(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pipeline")
    group.add_argument(
        "--autoencoder",
        choices=("pipeline", "identity"),
        help="pipeline: the one of --pretrained; identity: none, for training in pixel space (RGB in uint8)",
    )
    group.add_argument("--pretrained", metavar="PATH_OR_ID", help="folder or hub id in the layout of diffusers")
    group.add_argument("--revision", help="branch, tag or commit of the id")
    group.add_argument("--variant", help="variant of the weight files, for example fp16")
    group.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        help="dtype of the autoencoder and the text encoders; fp32 is exact, bf16 several times faster on a GPU",
    )
    group.add_argument(
        "--dtype",
        choices=("float16", "bfloat16", "float32", "int8"),
        help="dtype of the stored latents; bfloat16: for values beyond 65504, with 3 bits less; int8: 256 "
        "levels between the limits of each channel of each picture, half of the bytes of float16",
    )
    group.add_argument(
        "--statistics",
        metavar="own|measured|PATH",
        help="how latents become x0: by the shift and scale of the autoencoder (own); by mean and deviation of the "
        "encoded images, per channel or per element as in its recipe (measured); or by those of a data set or a file "
        "(.pt, .safetensors or .npz with mean and std or var). Default: own, or measured if it has none",
    )
    group.add_argument(
        "--posterior",
        choices=("each-step", "once", "mean"),
        help="each-step: store mean and deviation, of which every step draws a sample; once: store one sample; mean",
    )
    group.add_argument("--batch", type=count, help="images per pass through the autoencoder")


def _add_teacher(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("teacher, for --objective.alignment_weight")
    group.add_argument(
        "--teacher",
        metavar="ID|FOLDER",
        help="also store patch features of this vision model of transformers, such as facebook/dinov2-base, of the "
        "images resized by bicubic interpolation without antialiasing",
    )
    group.add_argument(
        "--teacher-side",
        type=count,
        metavar="N",
        help="features per side of an image, as many as the network has patches; default: half of the positions of a "
        "latent, for patches of 2",
    )
    group.add_argument(
        "--teacher-width",
        type=int,
        metavar="K",
        help="components of a feature, a byte each, of a map that is fitted to a sample; 0: all, without a map; "
        "default: at most 64",
    )
    group.add_argument(
        "--teacher-basis", metavar="FOLDER", help="take the map of this data set instead, to train on both"
    )
    group.add_argument("--teacher-token", action="store_true", help="also store the class token of the teacher")


def _add_images(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("images")
    group.add_argument("--resolution", type=count, help="side of the images in pixels")
    group.add_argument("--crop", choices=("center", "adm"), help="adm: the crop of ADM, DiT and SiT")
    group.add_argument(
        "--interpolation",
        choices=("nearest", "nearest_exact", "bilinear", "bicubic", "box", "hamming", "lanczos"),
        help="filter of the resize",
    )
    group.add_argument(
        "--buckets", action="store_true", help="keep the aspect ratio: sizes of up to --resolution squared pixels"
    )
    group.add_argument(
        "--bucket-step",
        type=count,
        help="side lengths of buckets are multiples of this; default: 8 latent positions, 64",
    )
    group.add_argument(
        "--bucket-sides",
        nargs=2,
        type=count,
        metavar=("MIN", "MAX"),
        help="limits of the sides of buckets in pixels; default: the longer side is at most twice the other",
    )
    group.add_argument(
        "--decode", choices=("auto", "dali", "pillow"), help="pillow is the exact reference; auto: DALI where it works"
    )
    group.add_argument(
        "--flip",
        action="store_true",
        help="also store the latents of the mirrored images; pixels need only --data.random_flip",
    )
    group.add_argument(
        "--classes-from",
        choices=("auto", "folder", "prefix", "none"),
        help="classes of an image folder: folder: the subfolder names; prefix: the part of a file name before the "
        "first underscore; none. auto: captions if there are any, otherwise the subfolders",
    )
    group.add_argument(
        "--masks",
        metavar="FOLDER|alpha",
        help="weights of the pixels in the loss, black 0 to white 1: a folder with a mask per picture, under its name "
        "without the ending and of its size, or the alpha channel of each picture, whose colours stay as they are "
        "below it; a picture without a mask counts as a whole",
    )
    group.add_argument("--image-root", metavar="FOLDER", help="folder of the images of a file of metadata")
    group.add_argument("--image-column", help="column of a Hugging Face dataset or a file of metadata")
    group.add_argument(
        "--references",
        metavar="FOLDER",
        help="pictures that each image refers to, for edit models: NAME.png, or NAME_1.png, NAME_2.png and so on",
    )
    group.add_argument(
        "--reference-column",
        metavar="COLUMN",
        help="column of a file of metadata with the reference, or a list of them",
    )
    group.add_argument("--dataset-config", metavar="NAME", help="configuration of a Hugging Face dataset")
    group.add_argument("--split", help="split of a Hugging Face dataset or a folder; of digits: all, train or test")
    group.add_argument("--max-samples", type=count, help="use only the first N images")


def _add_captions(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("captions")
    group.add_argument("--caption", metavar="TEXT", help="caption of each image without one, as 'a photo of sks dog'")
    group.add_argument(
        "--caption-from",
        choices=("folder",),
        help="caption of each image without one: the name of its folder, without the repeats of kohya's '10_sks dog'",
    )
    group.add_argument(
        "--captions",
        choices=("first", "all"),
        help="captions of an image to embed; all counts them first, which downloads remote tars completely",
    )
    group.add_argument(
        "--text-dtype",
        choices=("float16", "float32", "bfloat16", "float8_e4m3fn"),
        help="dtype of the stored text embeddings (default: --dtype); float8_e4m3fn: half of the bytes, 3 bits of "
        "mantissa, numbers up to 448",
    )
    group.add_argument(
        "--max-tokens",
        type=count,
        metavar="N",
        help="tokens of a caption that are read, of T5, Gemma and Qwen (default: as the pipeline); train with the same "
        "--pretrained.max_tokens",
    )
    group.add_argument("--caption-column", help="column or field of the captions")
    group.add_argument(
        "--caption-extension", metavar=".EXT", help="ending of caption files (default: .txt, or else .caption)"
    )
    group.add_argument(
        "--shuffle-tags",
        type=count,
        metavar="K",
        help="embed K variants of each caption, whose tags are shuffled; each training step draws one of them",
    )
    group.add_argument("--drop-tags", type=float, metavar="P", help="drop each tag of a variant with this probability")
    group.add_argument("--tag-separator", metavar="TEXT", help="between two tags (default: a comma)")
    group.add_argument(
        "--keep-tokens", type=count_or_zero, metavar="N", help="first N tags that are neither shuffled nor dropped"
    )
    group.add_argument(
        "--keep-separator",
        metavar="TEXT",
        help="tags before it are kept, as '|||' in 'sks, dog ||| red, small'; tags behind a second one too",
    )
    group.add_argument("--caption-prefix", metavar="TEXT", help="put before each caption, and shuffled with its tags")
    group.add_argument("--caption-suffix", metavar="TEXT", help="put behind each caption, and shuffled with its tags")
    group.add_argument("--seed", type=seed, help="of the variants (default: 0)")


def _add_kohya(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data of kohya's sd-scripts: folders N_name, or a .toml of data sets as SOURCE")
    group.add_argument(
        "--layout",
        choices=("auto", "kohya", "plain"),
        help="kohya: each subfolder N_name is a data set, repeated N times; plain: one data set. auto: kohya for a "
        "pipeline with text, if all pictures are in such folders",
    )
    group.add_argument("--regularisation", metavar="FOLDER", help="its folders N_name hold regularisation pictures")
    group.add_argument(
        "--prior-loss-weight", type=positive, metavar="W", help="factor of the loss of regularisation pictures (1)"
    )


def _add_work(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("work")
    group.add_argument(
        "--bad", choices=("fail", "skip"), help="skip: leave out unusable images and list them in OUT/bad_images.jsonl"
    )
    group.add_argument("--samples-per-shard", type=count, help="images per shard; a tar is one shard")
    group.add_argument("--workers", type=at_most(MOST_WORKERS), help="decoding threads per rank")


def _encode(arguments: argparse.Namespace) -> None:
    given = vars(arguments)
    source = given["source"]
    if source in _BUILTIN:
        _require_own(given, _BUILTIN[source])
        _encode_builtin(source, given)
        return
    with live_line.during("importing torch ..."):
        from fastdiff.data.encoding.images import encode_images
        from fastdiff.data.encoding.options import EncodeOptions
        from fastdiff.data.encoding.several import encode_several

    names = [name for name in EncodeOptions.__dataclass_fields__ if name != "directly"]
    _require_own(given, [*names, *_OF_KOHYA])
    own = {name: given[name] for name in names if name in given}
    if "bucket_sides" in own:
        own["bucket_sides"] = tuple(own["bucket_sides"])
    found = _parts(given)
    require(
        "prior_loss_weight" not in given or (found is not None and any(p.listed.regularisation for p in found.parts)),
        f"--prior-loss-weight: {source} has no regularisation pictures; name their folder by --regularisation, or set "
        "is_reg = true in a subset of a .toml, or leave it out",
    )
    if found is None:
        encode_images(EncodeOptions(**own))
    else:
        encode_several(found, own)


def _parts(given: Mapping[str, Any]) -> Parts | None:
    """Return the data sets of a source of kohya's; None: it is none. ConfigError: an option does not fit it."""
    from fastdiff.data.kohya.dataset_config import is_dataset_config, read_dataset_config
    from fastdiff.data.kohya.keys import keys_of
    from fastdiff.data.kohya.parts import is_layout, parts_of_config, parts_of_folders

    source, regularisation = Path(given["source"]), given.get("regularisation")
    layout, weight = given.get("layout", "auto"), given.get("prior_loss_weight", 1.0)
    if is_dataset_config(source):
        refused = [name for name in ("layout", "regularisation", "masks") if name in given]
        require(not refused, f"--{''.join(refused[:1])}: {source} says this itself, in its subsets; leave it out")
        return parts_of_config(read_dataset_config(source, keys_of(given)), weight, given.get("shuffle_tags"))
    captioned = given.get("autoencoder", "pipeline") == "pipeline" and given.get("classes_from", "auto") == "auto"
    if (
        layout == "kohya"
        or regularisation
        or (layout == "auto" and captioned and is_layout(source) and _has_text(given))
    ):
        require(layout != "plain", "--layout plain has no --regularisation; omit one")
        require(source.is_dir(), f"--layout kohya: {source} is no folder")
        require("caption" not in given, "--caption: the folders N_name give the captions; leave it out")
        return parts_of_folders(source, None if regularisation is None else Path(regularisation), weight)
    return None


def _has_text(given: Mapping[str, Any]) -> bool:
    """Return whether the pipeline has text encoders; an error of its is told later."""
    from fastdiff.models.pretrained.pipeline import Pretrained

    with suppress(FastdiffError):
        return bool(Pretrained(given["pretrained"], given.get("revision"), given.get("variant")).text_parts)
    return False


def _require_own(given: Mapping[str, Any], own: Collection[str]) -> None:
    """Refuse options that the source does not use."""
    source = given["source"]
    for name in given:
        flag = "--" + name.replace("_", "-")
        if name in (*own, "source", "out", "run"):
            continue
        if name in _BUILTIN["synthetic"]:
            instead = "use --max-samples" if name == "samples" and source not in _BUILTIN else "leave it out"
            raise ConfigError(f"{flag} is for the source synthetic, and the source is {source}; {instead}")
        raise ConfigError(
            f"{flag} is for images, and {source} is none; leave it out, or give a folder of that name as ./{source}"
        )


def _encode_builtin(source: str, given: Mapping[str, Any]) -> None:
    from fastdiff.data.encoding.builtin import encode_digits, encode_synthetic

    options, out = {name: given[name] for name in _BUILTIN[source] if name in given}, given["out"]
    try:
        info = encode_digits(out, **options) if source == "digits" else encode_synthetic(out, **options)
    except KeyboardInterrupt:
        raise Preempted(f"interrupted; {out} is not complete, and the same command begins anew") from None
    show(f"{out} is complete: {info.samples} samples; check it with `{shlex.join(['fastdiff', 'verify', str(out)])}`")
