"""Complete runs on handwritten digits, trained on two CPU cores in minutes."""

from typing import Any

from fastdiff.config.networks.adm import AdmConfig
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.pixart import PixArtConfig
from fastdiff.config.networks.pretrained import PretrainedConfig
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.config.optimizers.adamw import AdamWConfig
from fastdiff.config.optimizers.muon import MuonConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.config.sections.data import DataConfig, ValidationConfig
from fastdiff.config.sections.ema import EmaConfig
from fastdiff.config.sections.objective import DdpmConfig, FlowConfig
from fastdiff.config.sections.output import OutputConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.config.sections.timesteps import TimestepConfig

_DIT = DiTConfig(depth=4, hidden=128, heads=4, patch=2, channels=1, size=8, classes=10)


def digits() -> RunConfig:
    """8x8 digit scans: the first run on a new machine.

    fastdiff encode digits data/digits
    fastdiff train --preset digits --deepspeed_config zero3
    fastdiff evaluate runs/digits

    Measured (bench/results/cpu-2-cores/2026-11-21_digits): accuracy 1.000, Fréchet distance 0.25, 116 s for the steps.
    """
    return _run(
        "digits",
        model=_DIT,
        objective=DdpmConfig(schedule="linear", prediction="v"),
        optim=AdamWConfig(lr=2e-3, schedule="cosine", warmup_steps=80),
    )


def fast() -> RunConfig:
    """8x8 digit scans in 360 steps: the network and the data of `digits` with the methods that won in measurements.

    fastdiff encode digits data/digits
    fastdiff train --preset digits-fast
    fastdiff evaluate runs/digits-fast

    Muon by the matrices of the network, at the best rate of its sweep (2026-11-28_recipes); flow matching with
    logit-normal times (2026-11-22_objectives). `make demo` trains it. Its iterations are in fp32, which a CPU computes
    faster than bf16.

    Measured (bench/results/cpu-2-cores/2026-11-28_digits-fast): accuracy 0.994, Fréchet distance 0.20.
    """
    return _run(
        "digits-fast",
        samples=360 * 64,
        model=_DIT,
        objective=FlowConfig(prediction="flow"),
        timesteps=TimestepConfig(density="logit_normal"),
        optim=MuonConfig(lr=3.2e-2, adamw_lr=1.6e-2, iterations_dtype="fp32", schedule="cosine", warmup_steps=40),
    )


def text_to_image() -> RunConfig:
    """32x32 digit scans from captions ("a handwritten seven"): the complete text-to-image pipeline.

    make demo-t2i

    Measured (bench/results/cpu-2-cores/2026-11-21_digits-t2i): accuracy 0.900 of what diffusers draws, 4 min 55 s.
    """
    return _run(
        "digits-t2i",
        model=UNetConfig(
            size=8,
            block_out_channels=(32, 64),
            layers_per_block=1,
            attention_heads=(2, 2),
            transformer_layers=(1, 0),
            cross_attention_dim=32,
            norm_num_groups=8,
        ),
        pretrained=PretrainedConfig(path="data/digits-t2i/pipeline"),
        objective=DdpmConfig(schedule="scaled_linear", prediction="epsilon"),
        data=DataConfig(path="data/digits-t2i/latents"),
        optim=AdamWConfig(lr=2e-3, schedule="cosine", warmup_steps=60),
        ema=EmaConfig(rates=(0.98,)),
        validation=ValidationConfig(
            prompts=("a handwritten three", "a handwritten seven"), every=500, images_per_prompt=4, guidance_scale=4.0
        ),
        output=OutputConfig(folder="runs/digits-t2i", log_every=20, checkpoint_every=500),
    )


def text_dit() -> RunConfig:
    """32x32 digit scans from captions, with a text DiT and a tiny T5: `digits-t2i` with the blocks of PixArt.

    make demo-t2i MODEL=dit
    fastdiff train --preset digits-t2i-dit --deepspeed_config zero3

    The demo does both, with a SIGKILL in the middle of the training. It predicts v: the loss of epsilon has little
    weight where the class is decided, and learns the captions far more slowly.

    Measured (bench/results/cpu-2-cores/2026-11-28_digits-t2i-dit): accuracy 1.000 of what diffusers draws, 199 s of
    processor time.
    """
    return _run(
        "digits-t2i-dit",
        model=PixArtConfig(depth=4, hidden=128, heads=4, size=8, caption_dim=32, caption_tokens=8),
        pretrained=PretrainedConfig(path="data/digits-t2i-dit/pipeline"),
        objective=DdpmConfig(schedule="linear", prediction="v"),
        data=DataConfig(path="data/digits-t2i-dit/latents"),
        optim=AdamWConfig(lr=2e-3, schedule="cosine", warmup_steps=60),
        ema=EmaConfig(rates=(0.98,)),
        validation=ValidationConfig(
            prompts=("a handwritten three", "a handwritten seven"), every=500, images_per_prompt=4, guidance_scale=2.0
        ),
        output=OutputConfig(folder="runs/digits-t2i-dit", log_every=20, checkpoint_every=250),
    )


def adm() -> RunConfig:
    """8x8 digit scans with all parts of IDDPM: ADM UNet, cosine schedule, learned range, L_hybrid, importance sampling.

    fastdiff encode digits data/digits
    fastdiff train --preset digits-adm
    fastdiff evaluate runs/digits-adm

    Measured (bench/results/cpu-2-cores/2026-11-22_digits-adm): accuracy 0.996, Fréchet distance 0.11, 1 min 55 s.
    """
    return _run(
        "digits-adm",
        model=AdmConfig(classes=10, **_ADM),
        objective=_hybrid(condition_dropout=0.1),
        timesteps=TimestepConfig(density="importance"),
        optim=AdamWConfig(lr=1e-3, schedule="cosine", warmup_steps=80),
    )


def enlarged() -> RunConfig:
    """Super-resolution of digit scans from 4x4 to 8x8, without classes.

    fastdiff encode digits data/digits-train --split train
    fastdiff train --preset digits-sr
    fastdiff evaluate runs/digits-sr

    Measured (bench/results/cpu-2-cores/2026-11-22_digits-sr) on unseen forms: 19.4 dB (bicubic 13.4),
    accuracy 0.888 (bicubic 0.749), 1 min 37 s.
    """
    return _run(
        "digits-sr",
        model=AdmConfig(low_res_size=4, **_ADM),
        objective=_hybrid(condition_dropout=0.0),
        timesteps=TimestepConfig(density="importance"),
        data=DataConfig(path="data/digits-train"),
        optim=AdamWConfig(lr=1e-3, schedule="cosine", warmup_steps=80),
        output=OutputConfig(folder="runs/digits-sr", log_every=20, checkpoint_every=250, sample_every=0),
    )


_ADM: dict[str, Any] = {
    "channels": 1, "size": 8, "width": 32, "channel_mult": (1, 2), "res_blocks": 1, "attention_resolutions": (4,),
    "heads": 2, "norm_num_groups": 8, "learn_sigma": True,
}  # fmt: skip


def _hybrid(condition_dropout: float) -> DdpmConfig:
    """L_hybrid on the cosine schedule (arXiv:2102.09672)."""
    return DdpmConfig(
        schedule="cosine",
        prediction="epsilon",
        variance="learned_range",
        loss="rescaled_mse",
        condition_dropout=condition_dropout,
    )


def _run(name: str, **own: Any) -> RunConfig:
    """Common configuration of the runs: 1,000 steps of 64 samples."""
    steps, batch = 1000, 64
    common: dict[str, Any] = {
        "samples": steps * batch,
        "data": DataConfig(path="data/digits"),
        "batch": BatchConfig(samples=batch),
        "ema": EmaConfig(rates=(0.99,)),
        "performance": PerformanceConfig(precision="fp32"),
        "output": OutputConfig(folder=f"runs/{name}", log_every=20, checkpoint_every=250, sample_every=250),
    }
    return RunConfig(**common | own)
