"""Named, complete runs. The docstring of a preset has its commands and its measured or published result."""

import difflib
import inspect
import shlex
from collections.abc import Callable

from fastdiff.config.networks.dit import DIT_PATCHES, DIT_SIZES, DiTConfig, dit_config
from fastdiff.config.networks.pretrained import LoraConfig, PretrainedConfig
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.config.optimizers.adamw import AdamWConfig
from fastdiff.config.presets import digits, families, fast, iddpm, imagenet, pixart, small_images
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.config.sections.data import DataConfig, ValidationConfig
from fastdiff.config.sections.ema import EmaConfig
from fastdiff.config.sections.objective import DdpmConfig, FlowConfig, ObjectiveConfig
from fastdiff.config.sections.output import OutputConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.config.sections.sampler import SamplingConfig
from fastdiff.errors import ConfigError

Preset = Callable[[], RunConfig]


FID_400K: dict[str, float] = {
    "S/8": 153.60, "S/4": 100.41, "S/2": 68.40,
    "B/8": 122.74, "B/4": 68.38, "B/2": 43.47,
    "L/8": 118.87, "L/4": 45.64, "L/2": 23.33,
    "XL/8": 106.41, "XL/4": 43.01, "XL/2": 19.47,
}  # fmt: skip
"""FID-50K of the published DiTs on ImageNet at 256 px after 400 K steps, without guidance, 250 DDPM steps, the ft-MSE
decoder (table 4 of Peebles & Xie 2023)."""


def _dit(letter: str, patch: int) -> Preset:
    """Make the preset of a published DiT, with its own docstring."""
    size = f"{letter}/{patch}"
    name = f"dit-{letter.lower()}-{patch}-256"

    def build() -> RunConfig:
        objective = DdpmConfig(schedule="linear", prediction="epsilon", variance="learned_range")
        return _imagenet(name, dit_config(f"DiT-{size}", learn_sigma=True), objective, SamplingConfig())

    build.__doc__ = f"""DiT-{size} on ImageNet at 256 px, as published: noise and learned variance, 400 K steps of 256.

    fastdiff encode IMAGENET data/imagenet256 --pretrained stabilityai/sd-vae-ft-ema --resolution 256 --crop adm --flip
    fastdiff train --preset {name} --data.path data/imagenet256

    Source: Peebles & Xie 2023, arXiv:2212.09748, section 4, and its published train.py, with bf16 instead of fp32.
    Options: --optim.name adamw8bit; EDM2's averages, --ema.power_stds 0.05 0.1 --ema.snapshot_every 10000.

    Expected: FID-50K {FID_400K[size]:.2f} without guidance (table 4 there). Not measured here.
    """
    return build


def sit_xl_2_256() -> RunConfig:
    """SiT-XL/2 on ImageNet at 256 px, as published: flow matching on the linear path, otherwise as dit-xl-2-256.

    fastdiff encode IMAGENET data/imagenet256 --pretrained stabilityai/sd-vae-ft-ema --resolution 256 --crop adm --flip
    fastdiff train --preset sit-xl-2-256 --data.path data/imagenet256

    Source: Ma et al. 2024, arXiv:2401.08740, and its published train.py: velocity, uniform t, no weighting. The network
    is DiT's; its outputs for the variance are not trained. Its time and the sign of its velocity are SiT's
    (--objective.convention sit), so that published weights mean the same here, and weights of this run there. Options:
    --optim.name adamw8bit; EDM2's averages, --ema.power_stds 0.05 0.1 --ema.snapshot_every 10000.

    Drawn by 250 steps of Euler-Maruyama without guidance, for random classes, against ADM's statistics.

    Expected: FID-50K 17.2 without guidance (their SDE sampler, 400 K steps). Not measured here.
    """
    objective = FlowConfig(path="linear", convention="sit", prediction="flow")
    sampling = SamplingConfig(scheduler="euler-maruyama", steps=250, cfg=1.0, labels="random", protocol="adm")
    return _imagenet("sit-xl-2-256", dit_config("DiT-XL/2", learn_sigma=True), objective, sampling)


def _imagenet(name: str, model: DiTConfig, objective: ObjectiveConfig, sampling: SamplingConfig) -> RunConfig:
    """Common configuration of the DiT and SiT runs."""
    batch = 256
    return RunConfig(
        samples=400_000 * batch,
        model=model,
        objective=objective,
        data=DataConfig(path="data/imagenet256", random_flip=True),
        batch=BatchConfig(samples=batch),
        optim=AdamWConfig(name="adamw", lr=1e-4, weight_decay=0.0, clip=0.0),
        ema=EmaConfig(rates=(0.9999,)),
        sampling=sampling,
        performance=PerformanceConfig(device="cuda"),
        output=OutputConfig(folder=f"runs/{name}", checkpoint_every=10_000, sample_every=10_000),
    )


SD15_UNET = UNetConfig()
"""859.5 M parameters."""

SD2_UNET = UNetConfig(attention_heads=(5, 10, 20, 20), cross_attention_dim=1024, use_linear_projection=True)
"""865.9 M parameters."""

SDXL_UNET = UNetConfig(
    size=128, block_out_channels=(320, 640, 1280), attention_heads=(5, 10, 20), transformer_layers=(0, 2, 10),
    mid_transformer_layers=10, cross_attention_dim=2048, use_linear_projection=True, pooled_dim=1280,
)  # fmt: skip
"""2567.5 M parameters."""


def sd15_512() -> RunConfig:
    """Stable Diffusion 1.5's UNet from random weights at 512 px, as it was first trained: 8-bit Adam, batch 2048.

    fastdiff encode IMAGES data/t2i-512 --pretrained stable-diffusion-v1-5/stable-diffusion-v1-5 --resolution 512
    fastdiff train --preset sd15-512 --data.path data/t2i-512

    Not measured yet.
    """
    return _from_scratch("sd15-512", SD15_UNET, "stable-diffusion-v1-5/stable-diffusion-v1-5")


def sd2_512() -> RunConfig:
    """Stable Diffusion 2's UNet from random weights at 512 px; otherwise as sd15-512.

    fastdiff encode IMAGES data/t2i-512 --pretrained stabilityai/stable-diffusion-2-base --resolution 512
    fastdiff train --preset sd2-512 --data.path data/t2i-512

    Not measured yet.
    """
    return _from_scratch("sd2-512", SD2_UNET, "stabilityai/stable-diffusion-2-base")


def _from_scratch(name: str, model: UNetConfig, pipeline: str) -> RunConfig:
    batch = 2048
    return RunConfig(
        samples=500_000 * batch,
        model=model,
        pretrained=PretrainedConfig(path=pipeline),
        objective=DdpmConfig(schedule="scaled_linear", prediction="epsilon"),
        data=DataConfig(path="data/t2i-512"),
        batch=BatchConfig(samples=batch, micro="auto"),
        optim=AdamWConfig(
            name="adamw8bit", lr=1e-4, weight_decay=0.01, schedule="constant_with_warmup", warmup_steps=10_000
        ),
        performance=PerformanceConfig(device="cuda"),
        output=OutputConfig(folder=f"runs/{name}", checkpoint_every=5_000),
    )


def sd15_finetune() -> RunConfig:
    """Fine-tune Stable Diffusion 1.5, or another pipeline of 1.x, 2.x or XL by --pretrained.path, all weights.

    fastdiff encode IMAGES data/finetune --pretrained stable-diffusion-v1-5/stable-diffusion-v1-5 --resolution 512
    fastdiff train --preset sd15-finetune --data.path data/finetune

    An adapter in place of all weights: sd15-lora. Not measured yet.
    """
    optim = AdamWConfig(name="adamw8bit", lr=1e-5, weight_decay=0.01)
    return _finetune("sd15-finetune", SD15_UNET, "stable-diffusion-v1-5/stable-diffusion-v1-5", 15_000, optim)


def sdxl_finetune() -> RunConfig:
    """Fine-tune all weights of Stable Diffusion XL at 1024 px; otherwise as sd15-finetune.

    fastdiff encode IMAGES data/finetune-xl --pretrained stabilityai/stable-diffusion-xl-base-1.0 --resolution 1024
    fastdiff train --preset sdxl-finetune --data.path data/finetune-xl

    The rate of diffusers' script for batches of 4, 1e-6, times the root of the larger batch, after a warmup. A GPU of
    80 GB holds it; several of 24 GB share it by --deepspeed_config zero3. An adapter in place of all weights:
    sdxl-lora. Not measured yet.
    """
    optim = AdamWConfig(name="adamw8bit", lr=4e-6, weight_decay=0.01, schedule="constant_with_warmup", warmup_steps=500)
    return _finetune("sdxl-finetune", SDXL_UNET, "stabilityai/stable-diffusion-xl-base-1.0", 10_000, optim)


def _finetune(name: str, model: UNetConfig, pipeline: str, steps: int, optim: AdamWConfig) -> RunConfig:
    batch = 64
    return RunConfig(
        samples=steps * batch,
        model=model,
        pretrained=PretrainedConfig(path=pipeline, weights=True),
        objective=DdpmConfig(schedule="scaled_linear", prediction="auto"),
        data=DataConfig(path="data/finetune-xl" if model.pooled_dim else "data/finetune"),
        batch=BatchConfig(samples=batch, micro="auto"),
        optim=optim,
        ema=EmaConfig(warmup=True),
        performance=PerformanceConfig(device="cuda"),
        output=OutputConfig(folder=f"runs/{name}"),
    )


def sd15_lora() -> RunConfig:
    """A LoRA of Stable Diffusion 1.5 for ten to some hundred pictures; 2.x and others by --pretrained.path.

    fastdiff encode IMAGES data/photos --pretrained stable-diffusion-v1-5/stable-diffusion-v1-5 --resolution 512 --flip
    fastdiff train --preset sd15-lora --data.path data/photos --data.random-flip

    Prompts of the sample images are captions of the data unless --validation.prompts is given. Rates as in diffusers'
    LoRA script, rank 16. Not measured yet.
    """
    return _lora("sd15-lora", SD15_UNET, "stable-diffusion-v1-5/stable-diffusion-v1-5")


def sdxl_lora() -> RunConfig:
    """A LoRA of Stable Diffusion XL at 1024 px; otherwise as sd15-lora.

    fastdiff encode IMAGES data/photos --pretrained stabilityai/stable-diffusion-xl-base-1.0 --resolution 1024 --flip
    fastdiff train --preset sdxl-lora --data.path data/photos --data.random-flip

    With --lora.quantize 4bit for GPUs of little memory. Not measured yet.
    """
    return _lora("sdxl-lora", SDXL_UNET, "stabilityai/stable-diffusion-xl-base-1.0")


def _lora(name: str, model: UNetConfig, pipeline: str) -> RunConfig:
    batch, pictures_every = 8, 250
    return RunConfig(
        samples=1_000 * batch,
        model=model,
        pretrained=PretrainedConfig(path=pipeline, weights=True),
        lora=LoraConfig(rank=16),
        objective=DdpmConfig(schedule="scaled_linear", prediction="auto"),
        data=DataConfig(path="data/photos"),
        batch=BatchConfig(samples=batch, micro="auto"),
        optim=AdamWConfig(lr=1e-4, weight_decay=0.01),
        ema=EmaConfig(rates=()),
        performance=PerformanceConfig(device="cuda"),
        validation=ValidationConfig(captions=4, every=pictures_every),
        output=OutputConfig(folder=f"runs/{name}", log_every=10, checkpoint_every=pictures_every),
    )


_DITS = {f"dit-{letter.lower()}-{patch}-256": (letter, patch) for letter in DIT_SIZES for patch in DIT_PATCHES}
PRESETS: dict[str, Preset] = {
    "digits": digits.digits,
    "digits-fast": digits.fast,
    "digits-t2i": digits.text_to_image,
    "digits-t2i-dit": digits.text_dit,
    "digits-adm": digits.adm,
    "digits-sr": digits.enlarged,
    "sd15-512": sd15_512,
    "sd2-512": sd2_512,
    "sd15-finetune": sd15_finetune,
    "sdxl-finetune": sdxl_finetune,
    "sd15-lora": sd15_lora,
    "sdxl-lora": sdxl_lora,
    "flux2-klein-lora": families.flux2_klein_lora,
    "flux2-klein": families.flux2_klein,
    "z-image-lora": families.z_image_lora,
    "z-image": families.z_image,
    "sd35-medium-lora": families.sd35_medium_lora,
    "sd35-medium": families.sd35_medium,
    "qwen-image-lora": families.qwen_image_lora,
    "qwen-image": families.qwen_image,
    "pixart-256": pixart.pixart_256,
    "dit-small-images": small_images.dit_small_images,
    "sit-xl-2-256": sit_xl_2_256,
    "lightningdit-xl-1-256": imagenet.lightningdit_xl_1_256,
    "jit-b-16-256": imagenet.jit_b_16_256,
    "rit-xl-256": imagenet.rit_xl_256,
    "sr-dit-b-1-256": imagenet.sr_dit_b_1_256,
    "iddpm-imagenet64": iddpm.imagenet64,
    "iddpm-imagenet64-cond": iddpm.imagenet64_cond,
    "iddpm-cifar10": iddpm.cifar10,
    "iddpm-lsun256": iddpm.lsun256,
    "iddpm-upsampler": iddpm.upsampler,
} | {name: _dit(letter, patch) for name, (letter, patch) in _DITS.items()}
PRESETS["dit-xl-2-256-fast"] = fast.dit_xl_2_256_fast  # behind the published one, which shorter names lead to first

PATCHES: dict[str, Callable[[int], int]] = {"dit-small-images": small_images.patch_of}
"""Presets that choose the patch by the size of the images."""


def shown_presets() -> str:
    """Return the names of all presets in a few words: the published DiTs have twelve names of one form."""
    sizes, patches = ("|".join(str(part).lower() for part in parts) for parts in (DIT_SIZES, DIT_PATCHES))
    return ", ".join([*(name for name in PRESETS if name not in _DITS), f"dit-({sizes})-({patches})-256"])


def described_presets() -> dict[str, str]:
    """Return the first sentence about each preset by its name; the published DiTs are one."""
    shown = {name: (inspect.getdoc(PRESETS[name]) or "").splitlines()[0] for name in PRESETS if name not in _DITS}
    *_, largest = sizes = list(DIT_SIZES)
    shown[f"dit-{sizes[0].lower()}-{DIT_PATCHES[-1]}-256 ..."] = (
        f"DiT-{sizes[0]}/{DIT_PATCHES[-1]} to DiT-{largest}/{DIT_PATCHES[0]} on ImageNet at 256 px, as published."
    )
    return shown


def commands(name: str) -> list[str]:
    """Return the commands in the docstring of a preset, each in one line."""
    text = (inspect.getdoc(PRESETS[name]) or "").replace("\\\n", " ")
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [line for line in lines if line.startswith(("fastdiff ", "make "))]


def encode_command(name: str | None, path: str) -> str:
    """Return the command that makes the data set of a preset, or of any run, at ``path``, behind those it needs."""
    before: list[str] = []
    for line in commands(name) if name in PRESETS else []:
        words = line.split()
        if words[:2] == ["fastdiff", "convert"]:
            before.append(line)
        if words[:2] == ["fastdiff", "encode"]:
            return " && ".join([*before, shlex.join([*words[:3], path, *words[4:]])])
        if words[:1] == ["make"]:
            return line
    return shlex.join(["fastdiff", "encode", "IMAGES", path])


def preset(name: str, source: str = "--preset") -> RunConfig:
    """Return the preset called ``name``; for an unknown name, ConfigError with the nearest names and its ``source``."""
    if name not in PRESETS:
        near = [known for known in PRESETS if known.startswith(name)] or difflib.get_close_matches(name, PRESETS, n=1)
        if 0 < len(near) <= 4:
            hint = f"did you mean {' or '.join(near)}?"
        else:
            hint = f"nearest: {', '.join(difflib.get_close_matches(name, PRESETS, cutoff=0.0))};"
        raise ConfigError(f"{source} {name}: unknown; {hint} `fastdiff train --help` lists all presets")
    return PRESETS[name]()
