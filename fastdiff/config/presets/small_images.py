"""A complete run on any data set of small pictures, in pixels."""

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.optimizers.adamw import AdamWConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.config.sections.data import DataConfig
from fastdiff.config.sections.ema import EmaConfig
from fastdiff.config.sections.objective import DdpmConfig
from fastdiff.config.sections.output import OutputConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.errors import ConfigError

_ENOUGH_TOKENS = 256
_MOST_TOKENS = 1024
_LARGEST_PATCH = 8


def patch_of(size: int) -> int:
    """Return the smallest patch of 2 to 8 px that divides a size and leaves at most 256 tokens.

    Without one, the largest patch of at most 8 px that divides the size; a network never has one token alone.
    ConfigError: more than 1024 tokens are left: the size is a prime number, or large.
    """
    patch = _fitting(size)
    tokens = (size // patch) ** 2
    if tokens > _MOST_TOKENS:
        smaller = next(fewer for fewer in range(size, 0, -1) if (fewer // _fitting(fewer)) ** 2 <= _ENOUGH_TOKENS)
        raise ConfigError(
            f"images of {size} px have {tokens:,} tokens in patches of {patch} px, expected at most {_MOST_TOKENS:,}; "
            f"encode with --resolution {smaller}, or train them so with --model.patch {patch}"
        )
    return patch


def _fitting(size: int) -> int:
    patches = [patch for patch in range(1, _LARGEST_PATCH + 1) if size % patch == 0 and patch < size] or [1]
    few = (patch for patch in patches if patch > 1 and (size // patch) ** 2 <= _ENOUGH_TOKENS)
    return next(few, patches[-1])


def dit_small_images() -> RunConfig:
    """A small DiT on a folder of pictures of 8 to 64 px, in pixels, for one GPU or a processor.

    fastdiff encode IMAGES data/pictures --autoencoder identity --resolution 32
    fastdiff train --preset dit-small-images --data.path data/pictures

    IMAGES has one folder per class, or pictures without classes. Channels, size, classes and patch (256 tokens or
    fewer if the size can be divided) are those of the data set. On a CPU, shorten it by --steps. Not measured yet.
    """
    batch = 64
    return RunConfig(
        samples=10_000 * batch,
        model=DiTConfig(depth=6, hidden=192, heads=3, patch=patch_of(32), channels=3, size=32, classes=1),
        objective=DdpmConfig(schedule="cosine", prediction="v"),
        data=DataConfig(path="data/pictures"),
        batch=BatchConfig(samples=batch),
        optim=AdamWConfig(lr=5e-4, schedule="constant_with_warmup", warmup_steps=100),
        ema=EmaConfig(rates=(0.999,), warmup=True),
        performance=PerformanceConfig(precision="fp32"),
        output=OutputConfig(folder="runs/dit-small-images", log_every=20, checkpoint_every=500, sample_every=500),
    )
