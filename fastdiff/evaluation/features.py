"""Feature extractors for the comparison of image sets.

- ``pixels``: the pixels in [0, 1]; for small images, and without further dependencies.
- ``inception``: the pooled layer of the Inception network that defines FID (Heusel et al. 2017, arXiv:1706.08500), from
  the package torch-fidelity and a file of weights installed by the user. Nothing is downloaded.
- ``PATH.py:FUNCTION``: a function of the user; the file is executed. Or the name of an installed plug-in.
"""

import hashlib
import importlib
import importlib.util
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastdiff.errors import ConfigError, DataError, require
from fastdiff.evaluation.image_metrics import MOST_FEATURES
from fastdiff.evaluation.image_sets import ImageSet, Pixels
from fastdiff.files import read_bounded
from fastdiff.parallel.devices import select_device
from fastdiff.plugins.user_code import installed, load, names_file
from fastdiff.progress_bar import Bar


@dataclass(frozen=True, slots=True)
class Extractor:
    """A function from images to features, with its identity.

    Attributes:
        name: As requested.
        sha256: Digest of the weights or of the user's file; None for ``pixels``.
        function: ``[B, H, W, C]`` uint8, C 1 or 3, to ``[B, D]`` numbers.
    """

    name: str
    sha256: str | None
    function: Callable[[Pixels], Any]


def open_extractor(name: str) -> Extractor:
    """Open an extractor.

    Args:
        name: ``pixels``, ``inception`` or ``PATH.py:FUNCTION``.

    Raises:
        ConfigError: The name is unknown, or a required package or file is missing or invalid.
        OSError: A file cannot be read.
    """
    if name == "pixels":
        return Extractor(name, None, _pixels)
    if name == "inception":
        return Extractor(name, WEIGHTS_SHA256, open_inception())
    if not names_file(name) and name not in installed("fastdiff.features"):
        raise ConfigError(f"--features {name}: expected pixels, inception or PATH.py:FUNCTION")
    return _of_user(name)


def features_of(images: ImageSet, extractor: Extractor, batch: int, what: str) -> npt.NDArray[np.float32]:
    """Compute the features of all images, ``[N, D]`` float32, batch by batch.

    Args:
        images: N images.
        extractor: Called with ``batch`` images at a time, the last time with the rest.
        batch: At least 1.
        what: Label of the progress bar.

    Raises:
        ConfigError: The extractor does not return ``[B, D]`` numbers with a constant D of at most ``MOST_FEATURES``.
        DataError: A feature is not finite in float32, or an image is damaged.
        OSError: An image cannot be read.
    """
    found: npt.NDArray[np.float32] | None = None
    done = 0
    with Bar(what, len(images), "images") as bar:
        for pixels in images.batches(batch):
            features = features_of_batch(pixels, extractor)
            if found is None:
                found = np.empty((len(images), features.shape[1]), np.float32)
            if features.shape[1:] != found.shape[1:]:
                raise ConfigError(f"{extractor.name} gave {found.shape[1]} features, then {features.shape[1]}")
            if len(wrong := np.flatnonzero(~np.isfinite(features).all(axis=1))):
                raise DataError(f"{images.name_of(done + int(wrong[0]))}: {extractor.name} gives non-finite features")
            found[done : done + len(pixels)] = features
            done += len(pixels)
            bar.update(len(pixels))
    assert found is not None, "no set of images is empty"
    return found


def features_of_batch(pixels: Pixels, extractor: Extractor) -> npt.NDArray[np.float32]:
    """Compute the features ``[B, D]`` float32 of images ``[B, H, W, C]``; ConfigError as in ``features_of``."""
    return _checked(extractor.function(pixels), len(pixels), extractor.name)


def _checked(result: Any, images: int, name: str) -> npt.NDArray[np.float32]:
    try:
        features = np.asarray(result)
    except Exception as error:
        raise ConfigError(f"{name} returned {type(result).__name__}, not an array on the CPU ({error})") from error
    if features.ndim != 2 or len(features) != images or features.dtype.kind not in "fiu" or not features.shape[1]:
        raise ConfigError(
            f"{name} returned {features.dtype} {features.shape} for {images} images; expected numbers [{images}, D]"
        )
    if features.shape[1] > MOST_FEATURES:
        raise ConfigError(
            f"{name} gives {features.shape[1]} features per image, and the covariance grows with their square; at most "
            f"{MOST_FEATURES}: use --features inception, one of your own, or smaller images"
        )
    with np.errstate(over="ignore"):  # the caller finds overflows as non-finite features
        return features.astype(np.float32)


def _pixels(images: Pixels) -> npt.NDArray[np.float32]:
    return images.reshape(len(images), -1).astype(np.float32) / np.float32(255)


def _of_user(name: str) -> Extractor:
    plugin = load(name, "fastdiff.features", "--features")
    require(callable(plugin.found), f"--features {name}: expected a function of images")

    def features(images: Pixels) -> Any:
        with plugin.blamed("--features"):
            return plugin.found(images)

    return Extractor(name, plugin.identity.rpartition(" ")[2] if plugin.path else None, features)


WEIGHTS_BYTES, WEIGHTS_SHA256 = 95_628_359, "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
_FILE = "weights-inception-2015-12-05-6726825d.pth"
_URL = f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{_FILE}"
_OTHERWISE = "--features pixels and --features PATH.py:FUNCTION work without"

Extract = Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.float32]]


def open_inception() -> Extract:
    """Return a function from ``[B, H, W, C]`` uint8 images, C 1 or 3, to ``[B, 2048]`` fp32 features; on a GPU if any.

    Raises:
        ConfigError: The package or the weights are missing, or the weights are not the published ones.
        OSError: The weights cannot be read.
    """
    if importlib.util.find_spec("torch_fidelity") is None:
        raise ConfigError(
            "--features inception needs the package torch-fidelity: pip install --no-deps torch-fidelity (its "
            f"dependency torchvision is not needed here), and its weights, {_URL}, as {_weights_path()}; {_OTHERWISE}"
        )
    return inception_of(published_weights())


def published_weights() -> dict[str, torch.Tensor]:
    """Read the published weights from the hub folder of torch.

    Raises:
        ConfigError: The file is missing, or another one.
        OSError: The file cannot be read.
    """
    path = _weights_path()
    if not path.is_file():
        raise ConfigError(
            f"--features inception needs weights that are missing: download {_URL} ({WEIGHTS_BYTES} bytes, sha256 "
            f"{WEIGHTS_SHA256}) and put the file at {path}; {_OTHERWISE}"
        )
    try:
        content = read_bounded(path, WEIGHTS_BYTES)
    except ValueError as error:
        raise ConfigError(_other_file(path)) from error
    require(hashlib.sha256(content).hexdigest() == WEIGHTS_SHA256, _other_file(path))
    state: dict[str, torch.Tensor] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return state


def _weights_path() -> Path:
    return Path(torch.hub.get_dir()) / "checkpoints" / _FILE


def _other_file(path: Path) -> str:
    what = f"its sha256 is not {WEIGHTS_SHA256}; download it again: {_URL}"
    return f"{path} is damaged or another file: {what}; {_OTHERWISE}"


def inception_of(state: dict[str, torch.Tensor]) -> Extract:
    """Build torch-fidelity's Inception from weights that have its names."""
    # torch-fidelity unpickles its input, so it gets freshly packed tensors.
    packed = io.BytesIO()
    torch.save(state, packed)
    packed.seek(0)
    device = select_device()
    network = _inception_class()("inception-v3-compat", ["2048"], feature_extractor_weights_path=packed).to(device)

    @torch.no_grad()
    def features(images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        rgb = np.repeat(images, 3, axis=3) if images.shape[3] == 1 else images
        pixels = torch.from_numpy(rgb).to(device).permute(0, 3, 1, 2).contiguous()  # [B, H, W, 3] -> [B, 3, H, W]
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            (pooled,) = network(pixels)
        return np.asarray(pooled.cpu().numpy(), dtype=np.float32)

    return features


def _inception_class() -> Any:
    """Import the class without the package's ``__init__``, which imports torchvision for other extractors."""
    name = "torch_fidelity"
    known = name in sys.modules
    spec = importlib.util.find_spec(name)
    assert spec is not None
    sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    try:
        return importlib.import_module("torch_fidelity.feature_extractor_inceptionv3").FeatureExtractorInceptionV3
    finally:
        if not known:
            del sys.modules[name]
