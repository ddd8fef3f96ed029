"""Text-to-image transformers of the shape of PixArt."""

from fastdiff.config.networks.pixart import PixArtConfig
from fastdiff.config.networks.pretrained import PretrainedConfig
from fastdiff.config.optimizers.adamw import AdamWConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.config.sections.data import DataConfig
from fastdiff.config.sections.objective import DdpmConfig
from fastdiff.config.sections.output import OutputConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.config.sections.sampler import SamplingConfig

_SIGMA = "PixArt-alpha/PixArt-Sigma-XL-2-512-MS"
"""Its autoencoder, that of Stable Diffusion XL, and its text encoder, T5-XXL, are those of every PixArt-Sigma."""


def pixart_256() -> RunConfig:
    """PixArt-Sigma's transformer from random weights at 256 px: T5, noise and learned variance.

    fastdiff encode IMAGES data/t2i-256 --pretrained PixArt-alpha/PixArt-Sigma-XL-2-512-MS --resolution 256
    fastdiff train --preset pixart-256 --data.path data/t2i-256

    Source: Chen et al. 2023, arXiv:2310.00426, and 2024, arXiv:2403.04692, and their published configurations: network,
    initial weights, linear schedule, AdamW with 2e-5 and weight decay 0.03, clipped at 0.01. Drawn by 20 steps of
    DPM-Solver++ with guidance 4.5.

    It is not their recipe: theirs starts from a network trained on classes, goes on in stages on data of its own, drops
    captions to a stored null embedding under the mask of the caption (here: to the empty caption with its own mask,
    which diffusers' pipelines draw with), and Sigma's optimizer is CAME. Length and batch are chosen here.

    Expected: no published figure, and no protocol. Not measured here.
    """
    batch = 1024
    return RunConfig(
        samples=150_000 * batch,
        model=PixArtConfig(size=32, pe_interpolation=0.5, learn_sigma=True),
        pretrained=PretrainedConfig(path=_SIGMA),
        objective=DdpmConfig(schedule="linear", prediction="epsilon", variance="learned_range"),
        data=DataConfig(path="data/t2i-256"),
        batch=BatchConfig(samples=batch, micro="auto"),
        optim=AdamWConfig(lr=2e-5, weight_decay=0.03, clip=0.01, schedule="constant_with_warmup", warmup_steps=1000),
        performance=PerformanceConfig(device="cuda"),
        sampling=SamplingConfig(scheduler="dpmsolver++", steps=20, cfg=4.5),
        output=OutputConfig(folder="runs/pixart-256", checkpoint_every=5_000),
    )
