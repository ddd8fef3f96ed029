"""Transformers of 2025 and 2026 on the classes of ImageNet at 256 px, by flow matching.

Their time is 1 at the data; here t = 1 is noise, so that their interval of guidance [a, b] is [1 - b, 1 - a], and a
shift s of theirs is 1 / s.
"""

from fastdiff.config.networks.dit import DIT_SIZES, DiTConfig
from fastdiff.config.optimizers.adamw import AdamWConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.config.sections.data import DataConfig
from fastdiff.config.sections.ema import EmaConfig
from fastdiff.config.sections.objective import FlowConfig
from fastdiff.config.sections.output import OutputConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.config.sections.sampler import SamplingConfig
from fastdiff.config.sections.timesteps import TimestepConfig

_IMAGES = 1_281_167
"""Training images of ImageNet."""
_FP32_EPS = 1.1920929e-7
"""What torch adds to a mean square in fp32 if no number is given."""


def lightningdit_xl_1_256() -> RunConfig:
    """LightningDiT-XL/1 on ImageNet at 256 px in latents of VA-VAE, as published: 64 epochs of 1024.

    fastdiff convert vavae-imagenet256-f16d32-dinov2.pt data/vavae --statistics latents_stats.pt
    fastdiff encode IMAGENET data/vavae256 --pretrained data/vavae --resolution 256 --crop adm --flip --posterior once
    fastdiff train --preset lightningdit-xl-1-256 --data.path data/vavae256

    Source: Yao et al. 2025, arXiv:2501.01423, and its configuration lightningdit_xl_vavae_f16d32.yaml: SwiGLU, RMSNorm,
    rotary embedding beside fixed positions, no QK-norm; velocity and cosine loss, logit-normal times, one draw of the
    posterior, no clipping. The learning rate does not scale with the batch.

    Drawn by 249 steps of Euler, shifted in sampling alone, with guidance 10 of the first 3 channels below t = 0.9, for
    random classes, against ADM's statistics. Without guidance: --cfg 1.

    Expected: FID-50K 5.14 without guidance and 2.11 with it (README). Not measured here.
    """
    batch = 1024
    return _run(
        "lightningdit-xl-1-256",
        "data/vavae256",
        steps=80_000,
        batch=batch,
        model=DiTConfig(patch=1, channels=32, size=16, norm="rms-weight", mlp="swiglu", rotary=True),
        objective=FlowConfig(convention="sit", prediction="flow", cosine_weight=1.0),
        timesteps=TimestepConfig(density="logit_normal"),
        optim=AdamWConfig(lr=2e-4, betas=(0.9, 0.95), weight_decay=0.0, clip=0.0),
        ema=EmaConfig(rates=(0.9999,)),
        sampling=SamplingConfig(
            scheduler="euler", steps=249, shift=1 / 0.3, cfg=10.0, cfg_channels=3, cfg_interval=(0.0, 0.9),
            labels="random", protocol="adm",
        ),
    )  # fmt: skip


def jit_b_16_256() -> RunConfig:
    """JiT-B/16 on the pixels of ImageNet at 256 px, as published: x-prediction, 600 epochs of 1024.

    fastdiff encode IMAGENET data/pixels256 --autoencoder identity --resolution 256 --crop adm
    fastdiff train --preset jit-b-16-256 --data.path data/pixels256

    Source: Li & He 2025, arXiv:2511.13720, and its published training in PyTorch: prediction of the image with the loss
    of the velocity, logit-normal times, 32 class tokens from block 4 on, patches through 128 channels. The learning
    rate is 5e-5 * batch / 256.

    Drawn by 50 steps of Heun with a last one of Euler, with guidance 2.9 below t = 0.9, for as many images of each
    class, against statistics of torch-fidelity. The authors sweep averages (0.9996 is the second) and guidance.

    Expected: FID-50K 4.37 after 200 epochs and 3.66 after 600, both guided (tables of the paper). Not measured here.
    """
    batch = 1024
    epoch = _IMAGES // batch
    depth, hidden, heads = DIT_SIZES["B"]
    return _run(
        "jit-b-16-256",
        "data/pixels256",
        steps=600 * epoch,
        batch=batch,
        model=DiTConfig(
            depth=depth, hidden=hidden, heads=heads, patch=16, channels=3, size=256, norm="rms-weight", mlp="swiglu",
            rotary=True, qk_norm=True, patch_bottleneck=128, in_context=32, in_context_from=4,
        ),
        objective=FlowConfig(convention="sit", prediction="x0"),
        timesteps=TimestepConfig(density="logit_normal", mean=0.8, std=0.8),
        optim=AdamWConfig(
            lr=2e-4, betas=(0.9, 0.95), weight_decay=0.0, clip=0.0, schedule="constant_with_warmup",
            warmup_steps=5 * epoch,
        ),
        ema=EmaConfig(rates=(0.9999, 0.9996)),
        sampling=SamplingConfig(
            # Its interval leaves the level 0.9 itself out, which is one of the 51.
            scheduler="heun", steps=50, cfg=2.9, cfg_interval=(0.0, 0.899), clip=False, labels="balanced",
            protocol="torch-fidelity",
        ),
    )  # fmt: skip


def rit_xl_256() -> RunConfig:
    r"""RiT-XL on ImageNet at 256 px in features of DINOv2-S and its class token, as published: 800 epochs of 1536.

    fastdiff encode IMAGENET data/dinov2s256 --pretrained nyu-visionx/RAE-dinov2-wReg-small-ViTXL-n08 \
        --resolution 256 --crop adm --flip
    fastdiff train --preset rit-xl-256 --data.path data/dinov2s256

    Source: Zhang et al. 2026, arXiv:2605.21981, and its published training: prediction of the features with the loss of
    the velocity, and of the class token with a weight of 0.2; truncated logit-normal times with a shift by the size of
    the features, statistics per element. The learning rate is 5e-5 * batch / 256.

    Drawn by 25 steps of Heun with a last one of Euler, shifted as the training, with guidance 3.7 from t = 0.02 to 0.9,
    in fp32, for as many images of each class, against statistics of torch-fidelity. The token begins at the mean of the
    noise of the patches. Without guidance: --cfg 1.

    Expected: FID-50K 1.45 without guidance and 1.14 with it (abstract, of a model of 740 epochs). Not measured here.
    """
    batch = 1536
    epoch = _IMAGES // batch
    return _run(
        "rit-xl-256",
        "data/dinov2s256",
        steps=800 * epoch,
        batch=batch,
        model=DiTConfig(
            patch=1, channels=384, size=16, norm="rms-weight", mlp="swiglu", rotary=True, qk_norm=True, in_context=32,
            in_context_from=8, teacher_width=384,
        ),
        objective=FlowConfig(convention="sit", prediction="x0", teacher_weight=0.2),
        timesteps=TimestepConfig(density="logit_normal", truncation=1e-3, shift="latent"),
        optim=AdamWConfig(
            lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0, clip=1.0, schedule="constant_with_warmup",
            warmup_steps=5 * epoch,
        ),
        ema=EmaConfig(rates=(0.9999, 0.9996)),
        sampling=SamplingConfig(
            scheduler="heun", steps=25, cfg=3.7, cfg_interval=(0.02, 0.9), coupled_noise=True, labels="balanced",
            protocol="torch-fidelity",
        ),
    )  # fmt: skip


def sr_dit_b_1_256() -> RunConfig:
    r"""SR-DiT-B/1 on ImageNet at 256 px in latents of REPA-E's InVAE, as published: 400 K steps of 256.

    fastdiff convert e2e-invae-400k.pt data/invae --scale 0.3099
    fastdiff encode IMAGENET data/invae256 --pretrained data/invae --resolution 256 --crop adm --posterior once \
        --teacher facebook/dinov2-base --teacher-side 16 --teacher-width 0 --teacher-token
    fastdiff train --preset sr-dit-b-1-256 --data.path data/invae256

    Source: Bhanded 2025, arXiv:2512.12386, and its published training: SiT-B/1 with RMSNorm, rotary embedding, QK-norm,
    value residual and SPRINT (arXiv:2510.21986), the noised class token of DINOv2-B with a weight of 0.03 (REG,
    arXiv:2507.01467), alignment with its features and that token behind the second block (REPA, arXiv:2410.06940) and a
    contrastive term of 0.05 (arXiv:2506.05350); no mirrored images. The learning rate does not scale with the batch.

    Drawn by 250 steps of Euler-Maruyama, shifted as the training, with guidance 2.5 up to t = 0.85, whose unconditional
    part does without the sparse path, for as many images of each class, against ADM's statistics. Without guidance:
    --cfg 1.

    Expected: FID-50K 3.49 without guidance (README). Not measured here.
    """
    depth, hidden, heads = DIT_SIZES["B"]
    return _run(
        "sr-dit-b-1-256",
        "data/invae256",
        steps=400_000,
        batch=256,
        model=DiTConfig(
            depth=depth, hidden=hidden, heads=heads, patch=1, channels=32, size=16, norm="rms", rotary=True,
            qk_norm=True, qk_norm_eps=_FP32_EPS, value_residual=True, teacher_width=768, teacher_norm=True,
            teacher_zero=True, routing="sprint", aligned_width=768, aligned_block=2, aligned_token=True,
        ),
        objective=FlowConfig(
            convention="repa", prediction="flow", teacher_weight=0.03, alignment_weight=0.5, contrastive_weight=0.05
        ),
        timesteps=TimestepConfig(density="uniform", shift="latent"),
        optim=AdamWConfig(lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0, clip=1.0),
        ema=EmaConfig(rates=(0.9999,)),
        sampling=SamplingConfig(
            scheduler="euler-maruyama", steps=250, cfg=2.5, cfg_interval=(0.0, 0.85), labels="balanced", protocol="adm"
        ),
        flip=False,
    )  # fmt: skip


def _run(
    name: str,
    path: str,
    *,
    steps: int,
    batch: int,
    model: DiTConfig,
    objective: FlowConfig,
    timesteps: TimestepConfig,
    optim: AdamWConfig,
    ema: EmaConfig,
    sampling: SamplingConfig,
    flip: bool = True,
) -> RunConfig:
    """Add what these runs have in common."""
    return RunConfig(
        samples=steps * batch,
        model=model,
        objective=objective,
        timesteps=timesteps,
        data=DataConfig(path=path, random_flip=flip),
        batch=BatchConfig(samples=batch),
        optim=optim,
        ema=ema,
        sampling=sampling,
        performance=PerformanceConfig(device="cuda"),
        output=OutputConfig(folder=f"runs/{name}", checkpoint_every=10_000, sample_every=10_000),
    )
