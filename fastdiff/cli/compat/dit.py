"""Flags of facebookresearch/DiT's train.py, and their translation; flag names and defaults are theirs."""

import argparse
import os
import stat

from fastdiff.cli.compat.translation import EXPORT_NOTE, GRAY_NOTE, CountImages, Translation, absolute, flag, training
from fastdiff.config.arguments.types import count
from fastdiff.config.networks.dit import DIT_PATCHES, DIT_SIZES
from fastdiff.errors import ConfigError, FastdiffError, require

_IMAGENET = 1_281_167
"""Images of the training set of ImageNet's ILSVRC 2012."""
_SHOWN = (207, 360, 387, 974, 88, 979, 417, 279)
"""Classes that their sample.py draws."""
_REMEDY = "give --data-path of a folder with one folder of images per class"
_NOTES = (
    "the run is one folder that a second start continues; theirs creates a new numbered folder each time, "
    "and cannot resume",
    "noise, timesteps and dropped labels come from the seed and the position in the run, the same on any "
    "number of GPUs; theirs come from seed * processes + rank",
    "the posterior of each image, and of its mirror image, is stored as mean and standard deviation in 16 "
    "bits (`fastdiff encode --dtype float32`: in 32, as theirs), and sampled at every use, as in theirs",
    "an epoch has all images; theirs drops an incomplete last batch",
    f"{GRAY_NOTE}; EXIF rotation is applied, not in theirs",
    EXPORT_NOTE,
    "the last command is their sample.py with its classes and defaults, with the averaged weights and the "
    "autoencoder of the training; theirs decodes with --vae mse, and writes sample.png",
    "--performance.precision bf16 is several times faster than their fp32",
)
"""Differences of every run."""
_MODELS = [f"DiT-{letter}/{patch}" for letter in DIT_SIZES for patch in DIT_PATCHES]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of train.py."""
    add = parser.add_argument
    add("--data-path", required=True)
    add("--results-dir", default="results")
    add("--model", choices=_MODELS, default="DiT-XL/2")
    add("--image-size", type=int, choices=(256, 512), default=256)
    for name, number in (
        ("num-classes", 1000), ("epochs", 1400), ("global-batch-size", 256), ("log-every", 100), ("ckpt-every", 50_000),
    ):  # fmt: skip
        add(f"--{name}", type=count, default=number)
    add("--global-seed", type=int, default=0)
    add("--num-workers", type=int, default=4)
    add("--vae", choices=("ema", "mse"), default="ema")


def translate(flags: argparse.Namespace, gpus: int, count_images: CountImages) -> Translation:
    """Translate train.py: encode the images once, then train a DiT on the latents."""
    batch = flags.global_batch_size
    if batch % gpus:
        raise ConfigError(f"--global-batch-size {batch} is not divisible by {gpus} GPUs; their script refuses it too")
    data = absolute("--data-path", flags.data_path)
    here = _is_here(data)
    images = _images(data, count_images) if here else _IMAGENET
    steps = flags.epochs * (images // batch)
    if not steps:
        raise ConfigError(f"{flags.data_path} holds {images} images, fewer than --global-batch-size {batch}")
    results = absolute("--results-dir", flags.results_dir)
    latents = f"{results}/latents-{flags.image_size}"
    run = f"{results}/{_name(flags)}-{flags.image_size}"
    done = Translation(
        [
            _encode(flags, data, latents),
            training(gpus, *_flags(flags, steps, latents, run)),
            ["fastdiff", "export", run, f"{run}-export", "--overwrite", "--format", "dit-training"],
            _sample(flags, run, steps),
        ],
        [*_NOTES],
    )
    done.note(
        not here,
        f"--data-path {flags.data_path} is not here, so that its images cannot be counted: --samples is for the "
        f"{_IMAGENET} of ImageNet; translate where the images are, or set it to --epochs times the images",
    )
    return done


def _images(data: str, count_images: CountImages) -> int:
    try:
        return count_images(data)
    except FastdiffError as error:
        raise ConfigError(
            f"--epochs: the images of --data-path {data} cannot be counted ({error}); {_REMEDY}"
        ) from None


def _name(flags: argparse.Namespace) -> str:
    """Return the name of the network as in the presets."""
    return str(flags.model.lower().replace("/", "-"))


def _flags(flags: argparse.Namespace, steps: int, latents: str, run: str) -> list[list[str]]:
    batch, every = flags.global_batch_size, flags.ckpt_every
    return [
        flag("preset", f"{_name(flags)}-256"),
        flag("samples", steps * batch),
        flag("seed", flags.global_seed),
        flag("model.size", flags.image_size // 8),
        flag("model.classes", flags.num_classes),
        flag("model.learn_sigma", True),
        flag("data.path", latents),
        flag("data.random_flip", True),
        flag("batch.samples", batch),
        flag("optim.name", "adamw"),
        flag("optim.lr", 1e-4),
        flag("optim.weight_decay", 0.0),
        flag("optim.clip", 0.0),
        flag("ema.rates", (0.9999,)),
        flag("objective.prediction", "epsilon"),
        flag("objective.variance", "learned_range"),
        flag("objective.loss", "mse"),
        flag("objective.condition_dropout", 0.1),
        flag("performance.precision", "fp32"),
        flag("performance.allow_tf32", True),
        flag("output.folder", run),
        flag("output.log_every", flags.log_every),
        flag("output.checkpoint_every", every),
        flag("output.keep", max(2, steps // every + 1)),
        flag("output.sample_every", 0),
    ]


def _is_here(folder: str) -> bool:
    """Return whether the folder of the images is on this machine.

    Raises:
        ConfigError: it is something else than a folder.
        OSError: it can neither be here nor elsewhere, such as a path below a file.
    """
    try:
        mode = os.stat(folder).st_mode
    except FileNotFoundError:
        return False
    require(stat.S_ISDIR(mode), f"--data-path {folder}: expected a folder; {_REMEDY}")
    return True


def _sample(flags: argparse.Namespace, run: str, steps: int) -> list[str]:
    """Return the equivalent of their sample.py: images of eight classes of ImageNet.

    The name has the steps, because a file of an earlier end is not replaced.
    """
    shown = ("--classes", ",".join(map(str, _SHOWN))) if flags.num_classes > max(_SHOWN) else ()
    return [
        "fastdiff", "sample", run,
        "--scheduler", "ddpm", "--respacing", "250", "--cfg", "4", "--cfg-channels", "3", "--no-clip-denoised",
        *shown, "--per-class", "1", "--npz", f"{run}/samples-{steps}.npz",
    ]  # fmt: skip


def _encode(flags: argparse.Namespace, data: str, latents: str) -> list[str]:
    return [
        "fastdiff", "encode", data, latents,
        "--pretrained", f"stabilityai/sd-vae-ft-{flags.vae}",
        "--resolution", str(flags.image_size), "--crop", "adm", "--decode", "pillow", "--flip",
        "--workers", str(max(1, flags.num_workers)),
    ]  # fmt: skip
