"""The Inception that FID is defined with (Heusel et al. 2017, arXiv:1706.08500), by torch-fidelity.

Its weights are those of TensorFlow's graph of 2015-12-05; other Inceptions give other numbers. They are read from where
torch-fidelity looks for them too (``TORCH_HOME``), and only if they are the very file. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastdiff.bounded_read import read_bounded
from fastdiff.errors import ConfigError, require

WEIGHTS_BYTES, WEIGHTS_SHA256 = 95_628_359, "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
_FILE = "weights-inception-2015-12-05-6726825d.pth"
_URL = f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{_FILE}"
_OTHERWISE = "--features pixels and --features PATH.py:FUNCTION work without"

Extract = Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.float32]]


def open_inception() -> Extract:
    """What makes ``[B, 2048]`` fp32 features of ``[B, H, W, C]`` uint8 images, C 1 or 3, on the GPU if there is one.

    Raises:
        ConfigError: The package or the weights are missing, or the weights are others.
        OSError: They cannot be read.
    """
    if importlib.util.find_spec("torch_fidelity") is None:
        raise ConfigError(
            "--features inception needs the package torch-fidelity: pip install --no-deps torch-fidelity (of what it "
            f"depends on, torchvision is not needed here), and its weights, {_URL}, as {_weights_path()}; {_OTHERWISE}"
        )
    return inception_of(published_weights())


def published_weights() -> dict[str, torch.Tensor]:
    """The weights, from the file in its place.

    Raises:
        ConfigError: It is missing, or another file.
        OSError: It cannot be read.
    """
    path = _weights_path()
    if not path.is_file():
        raise ConfigError(
            f"--features inception needs weights that are not there: download {_URL} ({WEIGHTS_BYTES} bytes, sha256 "
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
    """torch-fidelity's Inception with these weights, by their names there."""
    # It unpickles whatever it is given, so it is given tensors, packed anew.
    packed = io.BytesIO()
    torch.save(state, packed)
    packed.seek(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = _inception_class()("inception-v3-compat", ["2048"], feature_extractor_weights_path=packed).to(device)

    @torch.no_grad()
    def features(images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        rgb = np.repeat(images, 3, axis=3) if images.shape[3] == 1 else images
        pixels = torch.from_numpy(rgb).to(device).permute(0, 3, 1, 2).contiguous()
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            (pooled,) = network(pixels)
        return np.asarray(pooled.cpu().numpy(), dtype=np.float32)

    return features


def _inception_class() -> Any:
    """The class, from the package without its ``__init__``, which imports torchvision for other extractors."""
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
