"""Transformers of 2025 and 2026 on classes of ImageNet at 256 px, by flow matching."""

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.optimizers.adamw import AdamWConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.config.sections.data import DataConfig
from fastdiff.config.sections.ema import EmaConfig
from fastdiff.config.sections.objective import FlowConfig
from fastdiff.config.sections.output import OutputConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.config.sections.timesteps import TimestepConfig


def lightningdit_xl_1_256() -> RunConfig:
    """LightningDiT-XL/1 on ImageNet at 256 px in latents of VA-VAE, trained as published: 64 epochs of 1024.

    fastdiff convert vavae-imagenet256-f16d32-dinov2.pt data/vavae --statistics latents_stats.pt
    fastdiff encode IMAGENET data/vavae256 --pretrained data/vavae --resolution 256 --crop adm --flip --posterior once
    fastdiff train --preset lightningdit-xl-1-256 --data.path data/vavae256

    Source: Yao et al. 2025, arXiv:2501.01423, and its configuration lightningdit_xl_vavae_f16d32.yaml: SwiGLU, RMSNorm,
    rotary embedding beside fixed positions, no QK-norm; velocity and cosine loss, logit-normal times, one draw
    of the posterior, no clipping. The learning rate does not scale with the batch.

    Expected: FID-50K 5.14 without guidance and 2.11 with it (README). Not measured here.
    """
    batch = 1024
    return RunConfig(
        samples=80_000 * batch,
        model=DiTConfig(patch=1, channels=32, size=16, norm="rms-weight", mlp="swiglu", rotary=True),
        objective=FlowConfig(convention="sit", prediction="flow", cosine_weight=1.0),
        timesteps=TimestepConfig(density="logit_normal"),
        data=DataConfig(path="data/vavae256", random_flip=True),
        batch=BatchConfig(samples=batch),
        optim=AdamWConfig(lr=2e-4, betas=(0.9, 0.95), weight_decay=0.0, clip=0.0),
        ema=EmaConfig(rates=(0.9999,)),
        performance=PerformanceConfig(device="cuda"),
        output=OutputConfig(folder="runs/lightningdit-xl-1-256", checkpoint_every=10_000, sample_every=10_000),
    )
