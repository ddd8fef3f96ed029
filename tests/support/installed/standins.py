"""Tiny stand-ins for what documented commands name: images, pipelines of the hub, runs, and flags of small networks."""

import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from fastdiff.models.pretrained import tiny_pipeline, tiny_pixart
from tests.support.inputs import recipes
from tests.support.processes import ROOT
from tests.support.servers.ports import reserved_port

NOT_RUN = {
    r"make ": "is of a clone; CI runs it",
    r"(pip|python -m pip) install": "needs a package index",
    r"docker ": "needs a daemon of docker; a test reads the Dockerfile",
    r"tensorboard ": "serves a page until it is ended",
    r"fastdiff watch$": "serves a page until it is ended; tests/dashboard has it",
    r"fastdiff \w+ runs/toy": "is of a package that the reader writes; test_family has one",
    r"(kubectl|sbatch|helm) ": "needs a cluster; tests/slurm has one",
}
"""Reasons by the beginning of a command."""

_SD15 = "stable-diffusion-v1-5/stable-diffusion-v1-5"
_PIPELINES: dict[str, tiny_pipeline.Kind] = {
    _SD15: "sd15",
    "stabilityai/stable-diffusion-2-base": "sd2",
    "stabilityai/stable-diffusion-xl-base-1.0": "sdxl",
}
_AUTOENCODER = "stabilityai/sd-vae-ft-ema"
_COMMIT = "0123456789abcdef0123456789abcdef01234567"

_WORDS = (
    (r"^srun .*?(?=fastdiff )", ""),
    (r"^torchrun --nproc-per-node \d+", "torchrun --nproc-per-node 2"),
    (r"\{00000\.\.09999\}", "{00000..00001}"),
    (r"--num_gpus \d+", lambda _: f"--num_accelerators 2 --master_port {reserved_port()}"),
    (r"--ranks \d+", "--ranks 2"),
    (r" --submit\b", ""),
    (r"t2i-lora -- \.\.\.", "t2i-lora -- --pretrained_model_name_or_path=... --train_data_dir=shop"),
    (r"iddpm-sr -- \.\.\.", "iddpm-sr -- --data_dir cifar_train --large_size 64 --small_size 16"),
    (r"=\.\.\.( |$)", r"=stabilityai/stable-diffusion-2-base\1"),
    (r" \.\.\.", ""),
    (r"--num \d+", "--num 8"),
    (r"--shape 4,32,32 --samples \d+", "--shape 4,32,32 --samples 16"),
    (r"--resolution (512|1024)\b", f"--resolution {tiny_pipeline.IMAGE_SIZE}"),
    (r"--resolution 256\b", "--resolution 128"),  # the small autoencoder divides by 4 instead of 8
    (r"--teacher-side 16\b", "--teacher-side 8"),  # of these 128 pixels
    (r"--batch\.samples \d+", "--batch.samples 4"),
    (r"(?<=[ .])steps \d+", "steps 2"),
    (r"--steps \d+", "--steps 2"),
)
"""What is smaller than documented, in any command."""

_DIT = "--model.depth 1 --model.hidden 32 --model.heads 2"
_NETWORKS = {
    r"--preset (dit|sit|lightningdit)-\w+-\d": _DIT,
    r"--preset jit-": "--model.depth 5 --model.hidden 32 --model.heads 2",
    r"--preset rit-": "--model.depth 9 --model.hidden 32 --model.heads 2",
    r"--preset sr-dit-": "--model.depth 5 --model.hidden 32 --model.heads 2",
    r"--preset pixart-": "--model.depth 1 --model.hidden 48 --model.heads 4",
    r"--preset sd(15|2)-512": (
        "--model.block-out-channels 32 64 --model.attention-heads 2 4 --model.transformer-layers 1 1 "
        "--model.layers-per-block 1 --model.norm-num-groups 8"
    ),
    r"--preset iddpm": (
        "--model.width 32 --model.res-blocks 1 --model.channel-mult 1 2 2 --model.attention-resolutions 16"
    ),
}
_TRAIN = "--output.sample-every 0 --output.log-every 1 --performance.device cpu"
_ADDED: tuple[tuple[str, Callable[[str], str]], ...] = (
    (r"^fastdiff train|^deepspeed .*fastdiff\.train\b", lambda text: _of_training(text)),
    # Of the documented size: not in the folder of a small run, which goes on with its own configuration alone.
    (r"^fastdiff launch (?!.*--output\.folder)", lambda _: " --output.folder runs/cluster"),
    (r"^fastdiff bench step", lambda _: " --smoke --steps 1"),
    (r"^fastdiff bench step .*--find-batch", lambda _: " --memory 1"),
    (r"^fastdiff bench step .*--peer", lambda _: " --batch 2"),
    (r"^fastdiff evaluate .*--reference", lambda _: f" --features {FEATURES}:of_images"),
    (r"^fastdiff compat dit ", lambda _: " --global-batch-size 4"),
    (r"^fastdiff evaluate .*--nll", lambda _: " --samples 2"),
    (r"fastdiff sample (?!.*--steps)", lambda _: " --steps 2"),
    (r"^fastdiff sample \S+\.pt", lambda _: f" {_DIT} --model.classes 2"),  # those of the pictures
)
_CHANGED: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    # The volume of a cluster is a folder here, except where a manifest names it.
    (r"^fastdiff (encode|sample|evaluate) .*", lambda found: found[0].replace(" /data/", " volume/")),
    # The digits take a thousand samples into 1 GiB, which a CPU tries for a quarter of an hour.
    (r"^(fastdiff bench step) --preset \S+ --precision bf16 (?=--find-batch)", r"\1 "),
    (r"^(fastdiff bench step --preset) dit-\S+", r"\1 digits"),
)


def command_of(text: str) -> str:
    """Return the command that runs in place of a documented one."""
    for pattern, replacement in (*_WORDS, *_CHANGED):
        text = re.sub(pattern, replacement, text)
    return text + "".join(added(text) for pattern, added in _ADDED if re.search(pattern, text))


def _of_training(text: str) -> str:
    if "--help" in text:
        return ""
    flags = [flags for pattern, flags in _NETWORKS.items() if re.search(pattern, text)]
    flags += [] if "--steps" in text else ["--steps 2"]
    flags += [] if "--batch.samples" in text else ["--batch.samples 4"]
    return " ".join(["", *flags, "--batch.micro 2", _TRAIN])


def fill_hub(home: Path) -> None:
    """Put small pipelines with the names of published ones into the cache of the hub's client in ``home``."""
    for name, kind in _PIPELINES.items():
        tiny_pipeline.build(_snapshot(home, name), kind=kind)
    tiny_pixart.build(_snapshot(home, "PixArt-alpha/PixArt-Sigma-XL-2-512-MS"))
    recipes.features_of_dino(_snapshot(home, "nyu-visionx/RAE-dinov2-wReg-small-ViTXL-n08"), side=8)
    recipes.dinov2_base(_snapshot(home, "facebook/dinov2-base"))
    vae = _snapshot(home, next(iter(_PIPELINES))) / "vae"
    shutil.copytree(vae, _snapshot(home, _AUTOENCODER), dirs_exist_ok=True)


def _snapshot(home: Path, name: str) -> Path:
    repository = home / ".cache" / "huggingface" / "hub" / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(_COMMIT)
    snapshot = repository / "snapshots" / _COMMIT
    snapshot.mkdir(parents=True, exist_ok=True)
    return snapshot


def captioned(folder: Path) -> None:
    """Write eight images with captions."""
    _images(folder)
    names = sorted(path.name for path in folder.iterdir())
    rows = [f'{{"file_name": "{name}", "text": "a red shoe"}}\n' for name in names]
    (folder / "metadata.jsonl").write_text("".join(rows))


def in_tars(pattern: Path) -> None:
    """Write two WebDataset tars of four images with captions."""
    pattern.parent.mkdir(parents=True, exist_ok=True)
    for number in range(2):
        folder = pattern.parent / f"images-{number}"
        _images(folder, 4)
        with tarfile.open(pattern.parent / f"{number:05d}.tar", "w") as tar:
            for image in sorted(folder.iterdir()):
                image.with_suffix(".txt").write_text("a red shoe")
                for file in (image, image.with_suffix(".txt")):
                    tar.add(file, arcname=file.name)


def of_classes(folder: Path) -> None:
    """Write eight images of two classes, a folder each."""
    for name in ("n01440764", "n01443537"):
        _images(folder / name, 4)


def of_classes_by_name(folder: Path) -> None:
    """Write eight images whose names begin with their class."""
    _images(folder, prefixes=("cat_", "dog_"))


def _images(folder: Path, count: int = 8, prefixes: tuple[str, ...] = ("",)) -> None:
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for number in range(count):
        pixels = draw.integers(0, 256, (144, 160, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{prefixes[number % len(prefixes)]}{number}.png")


def write_network(file: Path) -> None:
    """Write net.py, the own network of the page on Python; ``file`` may be its name with that of the class."""
    (text,) = re.findall(r"^```python\n(# net\.py\n.*?)^```", (ROOT / "docs" / "api.md").read_text(), re.M | re.S)
    file.with_name("net.py").write_text(text)


def _hosts(file: Path) -> None:
    file.write_text("node1 slots=8\nnode2 slots=8\n")


FEATURES = "features.py"
"""A file in every working folder, in place of the Inception network."""
FEATURES_TEXT = """
def of_images(images):
    return images.reshape(len(images), -1)[:, :48].astype("float32")
"""
FILES: dict[str, Callable[[Path], None]] = {
    "photos": captioned, "images": captioned, "pictures": of_classes, "held-out": of_classes,
    "shop": captioned, "shards/{00000..00001}.tar": in_tars, "volume/imagenet/train": of_classes,
    "imagenet/train": of_classes, "cifar10/train": of_classes, "cifar_train": of_classes_by_name, "hosts": _hosts,
    "net.py:MLP": write_network, "vavae-imagenet256-f16d32-dinov2.pt": recipes.va_vae,
    "latents_stats.pt": recipes.latent_statistics, "e2e-invae-400k.pt": recipes.va_vae,
}  # fmt: skip
"""Inputs that a user has, by the name that the documents give them."""

_PIXELS = "--autoencoder identity --resolution 32 --crop adm --classes-from none"
MADE: dict[str, tuple[str, ...]] = {
    "data/digits": ("fastdiff encode digits data/digits",),
    "runs/digits": ("fastdiff train --preset digits --data.path data/digits",),
    "volume/runs/dit": (
        "fastdiff train --preset dit-xl-2-256 --data.path volume/imagenet256 --output.folder volume/runs/dit",
    ),
    "volume/imagenet256.npz": ("fastdiff sample volume/runs/dit --num 50000 --seed 1 --npz volume/imagenet256.npz",),
    "data/t2i-512": (
        "fastdiff encode images data/t2i-512 --pretrained stabilityai/stable-diffusion-2-base --resolution 512",
    ),
    "runs/sd2-512": ("fastdiff train --preset sd2-512 --data.path data/t2i-512",),
    "data/imagenet256": (
        f"fastdiff encode imagenet/train data/imagenet256 --pretrained {_AUTOENCODER} --resolution 256 --flip",
    ),
    "runs/dit-xl-2-256": ("fastdiff train --preset dit-xl-2-256 --data.path data/imagenet256",),
    "DiT-XL-2-256x256.pt": (
        "fastdiff export runs/dit-xl-2-256 published --format dit",
        "cp published/*.pt DiT-XL-2-256x256.pt",
    ),
    "data/cifar10": (f"fastdiff encode cifar10/train data/cifar10 {_PIXELS}",),
    "runs/cifar10": ("fastdiff train --preset iddpm-cifar10 --data.path data/cifar10 --output.folder runs/cifar10",),
    "data/photos": (f"fastdiff encode photos data/photos --pretrained {_SD15} --resolution 512 --flip",),
    "runs/sd15-lora": ("fastdiff train --preset sd15-lora --data.path data/photos",),
    "runs/sd15-finetune": ("fastdiff train --preset sd15-finetune --data.path data/photos",),
    "real.npz": ("fastdiff sample runs/digits --num 50000 --seed 1 --npz real.npz",),
    "imagenet256.npz": ("fastdiff sample runs/dit-xl-2-256 --num 50000 --seed 1 --npz imagenet256.npz",),
}
"""Results of earlier work, which a document takes for granted: by name, the commands that make them."""
