"""Recipes of improved-diffusion's README.

Nichol & Dhariwal 2021, arXiv:2102.09672; the runs are as long as those of the published checkpoints. bf16 replaces
fp32. improved-diffusion sums the gradients of micro-batches; here they are averaged, which Adam normalises away.
"""

from dataclasses import replace

from fastdiff.config.networks.adm import AdmConfig
from fastdiff.config.optimizers.adamw import AdamWConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.config.sections.data import DataConfig
from fastdiff.config.sections.ema import EmaConfig
from fastdiff.config.sections.objective import DdpmConfig
from fastdiff.config.sections.output import OutputConfig
from fastdiff.config.sections.performance import PerformanceConfig

_COSINE = DdpmConfig(
    schedule="cosine",
    timesteps=4000,
    rescale_timesteps=True,
    prediction="epsilon",
    variance="learned_range",
    loss="rescaled_mse",
    condition_dropout=0.0,
)
"""L_hybrid on the cosine schedule."""
_SIX_LEVELS = (1, 1, 2, 2, 4, 4)


def imagenet64() -> RunConfig:
    """Unconditional ImageNet at 64 px by IDDPM: 121 M parameters, L_hybrid, 1.5 M steps of 128.

    fastdiff encode IMAGENET data/imagenet64 --autoencoder identity --resolution 64 --crop adm --classes-from none
    fastdiff train --preset iddpm-imagenet64 --data.path data/imagenet64

    For L_vlb instead: --objective.loss rescaled_kl --timesteps.density importance.
    Source: arXiv:2102.09672. Not measured here.
    """
    return _run("iddpm-imagenet64", 1_500_000, AdmConfig(learn_sigma=True), _COSINE)


def imagenet64_cond() -> RunConfig:
    """Class-conditional ImageNet at 64 px by IDDPM: 273 M parameters, 250 K steps of 2048.

    fastdiff encode IMAGENET data/imagenet64 --autoencoder identity --resolution 64 --crop adm --classes-from prefix
    fastdiff train --preset iddpm-imagenet64-cond --data.path data/imagenet64

    Source: arXiv:2102.09672, section 5. Not measured here.
    """
    model = AdmConfig(width=192, classes=1000, learn_sigma=True)
    objective = replace(_COSINE, loss="mse", rescale_timesteps=False)
    return _run("iddpm-imagenet64-cond", 250_000, model, objective, batch=2048, lr=3e-4)


def cifar10() -> RunConfig:
    """Unconditional CIFAR-10 by IDDPM: 53 M parameters, dropout, L_hybrid, 500 K steps of 128.

    fastdiff encode CIFAR10 data/cifar10 --autoencoder identity --resolution 32 --crop adm --classes-from none
    fastdiff train --preset iddpm-cifar10 --data.path data/cifar10

    For L_vlb instead: --objective.loss rescaled_kl --timesteps.density importance.
    Source: arXiv:2102.09672. Not measured here.
    """
    model = AdmConfig(size=32, channel_mult=(1, 2, 2, 2), dropout=0.3, learn_sigma=True)
    return _run("iddpm-cifar10", 500_000, model, _COSINE)


def lsun256() -> RunConfig:
    """LSUN bedrooms at 256 px by IDDPM: 114 M parameters, linear schedule of 1000 steps, 1.2 M steps of 128.

    fastdiff encode BEDROOMS data/lsun256 --autoencoder identity --resolution 256 --crop adm --classes-from none
    fastdiff train --preset iddpm-lsun256 --data.path data/lsun256

    The second published run has --optim.lr 2e-5. Source: arXiv:2102.09672. Not measured here.
    """
    model = AdmConfig(
        size=256, channel_mult=_SIX_LEVELS, res_blocks=2, heads=1, attention_resolutions=(16,), scale_shift_norm=False,
        learn_sigma=True,
    )  # fmt: skip
    objective = replace(_COSINE, schedule="linear", timesteps=1000, loss="mse", rescale_timesteps=False)
    return _run("iddpm-lsun256", 1_200_000, model, objective)


def upsampler() -> RunConfig:
    """ImageNet from 64 to 256 px by IDDPM: 280 M parameters, linear schedule of 4000 steps, 500 K steps of 256.

    fastdiff encode IMAGENET data/imagenet256 --autoencoder identity --resolution 256 --crop adm --classes-from prefix
    fastdiff train --preset iddpm-upsampler --data.path data/imagenet256

    Source: arXiv:2102.09672, section 5. Not measured here.
    """
    model = AdmConfig(
        size=256, channel_mult=_SIX_LEVELS, width=192, res_blocks=2, classes=1000, low_res_size=64, learn_sigma=True
    )
    objective = replace(_COSINE, schedule="linear", loss="mse", rescale_timesteps=False)
    return _run("iddpm-upsampler", 500_000, model, objective, batch=256, lr=3e-4)


def _run(
    name: str, steps: int, model: AdmConfig, objective: DdpmConfig, batch: int = 128, lr: float = 1e-4
) -> RunConfig:
    """Common configuration of the runs."""
    folder = f"data/{'imagenet256' if model.low_res_size else name.removeprefix('iddpm-').removesuffix('-cond')}"
    return RunConfig(
        samples=steps * batch,
        model=model,
        objective=objective,
        data=DataConfig(path=folder),
        batch=BatchConfig(samples=batch),
        optim=AdamWConfig(name="adamw", lr=lr, weight_decay=0.0, clip=0.0),
        ema=EmaConfig(rates=(0.9999,)),
        performance=PerformanceConfig(device="cuda"),
        output=OutputConfig(
            folder=f"runs/{name}", checkpoint_every=10_000, sample_every=0 if model.size > 64 else 10_000
        ),
    )
