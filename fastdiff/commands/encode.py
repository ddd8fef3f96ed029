"""``fastdiff encode``: write latent shards."""

from __future__ import annotations

import argparse
from pathlib import Path

from fastdiff.commands.arguments import Subcommands, count, shape
from fastdiff.errors import require

_ITSELF = ("digits", "synthetic")


def add(commands: Subcommands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "encode",
        help="write latent shards",
        description="Encode images into latent shards with the autoencoder and the text encoder of a pipeline. Run it "
        "on many GPUs with torchrun, deepspeed --no_python --no_local_rank, or srun. After a kill, the same command "
        "goes on where it was.",
    )
    parser.add_argument(
        "source",
        help="images: a folder (with metadata.jsonl or .csv, or text files beside them, or one folder per class), tars "
        "of WebDataset (path or address, braces allowed), or a Hugging Face dataset; or digits (scikit-learn's 1,797 "
        "real scans) or synthetic, which take no --pretrained",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; must not hold a data set yet")
    _add_pipeline(parser)
    _add_images(parser)
    _add_work(parser)
    group = parser.add_argument_group("synthetic")
    group.add_argument("--shape", type=shape, default=(4, 32, 32), metavar="C,H,W", help="latent shape")
    group.add_argument("--samples", type=count, default=10_000, help="number of samples")
    group.add_argument("--classes", type=count, default=1000, help="number of classes")
    parser.set_defaults(run=_encode)


def _add_pipeline(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pipeline")
    group.add_argument("--pretrained", metavar="PATH_OR_ID", help="folder or hub id in the layout of diffusers")
    group.add_argument("--revision", help="branch, tag or commit of the id")
    group.add_argument("--variant", help="variant of the weight files, for example fp16")
    group.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="of the autoencoder and the text encoders; fp32 is exact, bf16 several times as fast on a GPU",
    )
    group.add_argument("--dtype", choices=("float16", "float32"), default="float16", help="of what is stored")
    group.add_argument("--batch", type=count, default=16, help="images per pass through the autoencoder")


def _add_images(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("images")
    group.add_argument("--resolution", type=count, default=512, help="side of the images in pixels")
    group.add_argument("--crop", choices=("center", "adm"), default="center", help="adm: as ADM, DiT and SiT do it")
    group.add_argument(
        "--interpolation",
        choices=("nearest", "nearest_exact", "bilinear", "bicubic", "box", "hamming", "lanczos"),
        default="lanczos",
        help="filter of the resize",
    )
    group.add_argument(
        "--buckets", action="store_true", help="keep the aspect ratio: sizes of up to --resolution squared pixels"
    )
    group.add_argument(
        "--bucket-step", type=count, help="what the sides of buckets are multiples of; default: 8 latent positions, 64"
    )
    group.add_argument(
        "--decode",
        choices=("auto", "dali", "pillow"),
        default="auto",
        help="pillow is the exact reference; auto: DALI where it is installed",
    )
    group.add_argument("--flip", action="store_true", help="store the latents of the mirrored images too")
    group.add_argument(
        "--captions",
        choices=("first", "all"),
        default="first",
        help="which captions of an image are embedded; all reads the source twice, to count them",
    )
    group.add_argument("--image-column", default="image", help="column of a Hugging Face dataset")
    group.add_argument("--caption-column", default="text", help="column or field of the captions")
    group.add_argument("--split", default="train", help="split of a Hugging Face dataset or a folder")
    group.add_argument("--max-samples", type=count, help="only so many images, the first ones")


def _add_work(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("work")
    group.add_argument(
        "--bad",
        choices=("fail", "skip"),
        default="fail",
        help="skip: images that cannot be used are left out and listed in OUT/bad_images.jsonl",
    )
    group.add_argument("--samples-per-shard", type=count, default=1024, help="images per shard; a tar is one shard")
    group.add_argument("--workers", type=count, default=4, help="threads that decode, per rank")


def _encode(arguments: argparse.Namespace) -> None:
    if arguments.source in _ITSELF:
        require(
            arguments.pretrained is None,
            f"{arguments.source} are no images, and take no --pretrained; for a folder of that name, say "
            f"./{arguments.source}",
        )
        _encode_itself(arguments)
        return
    require(
        arguments.pretrained is not None,
        f"--pretrained is missing: the pipeline whose autoencoder encodes {arguments.source} (without it, the source "
        f"is {' or '.join(_ITSELF)})",
    )
    from fastdiff.data.encode_images import encode_images
    from fastdiff.data.encode_options import EncodeOptions

    names = EncodeOptions.__dataclass_fields__
    encode_images(EncodeOptions(**{name: getattr(arguments, name) for name in names}))


def _encode_itself(arguments: argparse.Namespace) -> None:
    from fastdiff.data.encode import encode_digits, encode_synthetic

    if arguments.source == "digits":
        encode_digits(arguments.out)
    else:
        encode_synthetic(arguments.out, arguments.shape, arguments.samples, classes=arguments.classes)
