"""Patch features of a teacher as columns of a data set: reduced by a linear map, and stored in int8.

The map holds the first right singular vectors of a sample of features. They are not centred, so that the cosine of two
reduced features is nearly that of the features. Features that keep all components stay as they are: a map would only
rotate them, away from the class token of the teacher. Each component has a scale, by which its largest value in the
sample becomes 96, and values beyond 127 are clipped.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fastdiff.conditions import FEATURES, TEACHER_TOKEN
from fastdiff.data.shards.format import Normalisation
from fastdiff.errors import ConfigError, require
from fastdiff.models.encoders.teacher import Teacher

BASIS_FILE = "teacher.safetensors"
"""File of a data set with the map."""
_ABOUT = "teacher"
"""Key of the metadata of the file."""
_LEVELS, _LARGEST = 127, 96
_USUAL = 64
"""Components of a stored feature: 16 KiB of a picture with 256 patches, in place of 192 KiB of DINOv2-B."""
_OF_IMAGE = 32
"""Features of an image in the sample, at most."""


@dataclass(frozen=True)
class Basis:
    """The map of features."""

    matrix: Tensor
    """``[W, K]`` fp32, orthonormal columns; the identity for ``K = W``."""
    scale: Tensor
    """``[K]`` fp32: a stored 1."""
    kept: float
    """Share of the squared norm of the sample that the map keeps."""
    digest: str
    """Of the weights of the teacher."""

    @property
    def normalisation(self) -> Normalisation:
        """The normalisation of what is stored."""
        return Normalisation(shift=(0.0,) * len(self.scale), scale=tuple(float(f"{v:.9g}") for v in self.scale))

    def reduced(self, features: Tensor) -> Tensor:
        """``[B, W, h, w]`` features ``-> [B, K, h, w]``, whole numbers of -127 to 127."""
        components = torch.einsum("bwij,wk->bkij", features, self.matrix.to(features.device))
        scaled = components / self.scale.to(features.device).view(-1, 1, 1)
        return scaled.round().clamp(-_LEVELS, _LEVELS)

    @property
    def matrix_digest(self) -> str:
        """Digest of the map and its scales."""
        return hashlib.sha256(self.matrix.numpy().tobytes() + self.scale.numpy().tobytes()).hexdigest()

    @property
    def content(self) -> bytes:
        """The file of the map."""
        # One key: the file has several in no order.
        about = {_ABOUT: json.dumps({"kept": self.kept, "digest": self.digest})}
        found: bytes = save({"matrix": self.matrix.contiguous(), "scale": self.scale}, metadata=about)
        return found

    @classmethod
    def read(cls, path: Path) -> "Basis":
        """Read the map of a data set, or of a file; ConfigError if it has none."""
        path = path / BASIS_FILE if path.is_dir() else path
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})[_ABOUT])
                matrix, scale = file.get_tensor("matrix"), file.get_tensor("scale")
                return cls(matrix, scale, float(about["kept"]), about["digest"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ConfigError(
                f"--teacher-basis {path}: no map of a teacher's features ({error}); expected a data set that was "
                f"encoded with --teacher, or its file {BASIS_FILE}"
            ) from None

    @classmethod
    def fit(cls, sample: Tensor, width: int, digest: str) -> "Basis":
        """Return the map of a sample ``[N, W]`` to ``width`` components."""
        exact = sample.double()
        matrix = _leading(exact, width) if width < exact.shape[1] else torch.eye(width, dtype=exact.dtype)
        components = exact @ matrix
        scale = components.abs().amax(0).clamp(min=torch.finfo(torch.float32).tiny) / _LARGEST
        kept = float(components.square().sum() / exact.square().sum())
        return cls(matrix.float(), scale.float(), kept, digest)


class TeacherColumns:
    """The columns that a teacher gives.

    Args:
        teacher: a vision model.
        width: components of a stored feature, at most the width of the teacher; 0: all; None: at most ``_USUAL``.
        token: whether to store its class token, too.

    Attributes:
        basis: the map, once it is known.
    """

    basis: Basis

    def __init__(self, teacher: Teacher, width: int | None, *, token: bool) -> None:
        self._teacher, self._token = teacher, token
        require(
            (width or 0) <= teacher.width,
            f"--teacher-width {width}: the features of this teacher have {teacher.width} numbers; give at most that",
        )
        require(
            teacher.has_token or not token,
            "--teacher-token: this teacher has no class token; leave it out",
        )
        self.width = min(_USUAL, teacher.width) if width is None else width or teacher.width
        self.digest, self.device = teacher.digest, teacher.device

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the columns."""
        side = self._teacher.side
        token = {TEACHER_TOKEN: (self._teacher.width,)} if self._token else {}
        return {FEATURES: (self.width, side, side), **token}

    def __call__(self, pixels: Tensor) -> dict[str, Tensor]:
        """Return the columns of pixels ``[B, H, W, 3]`` uint8."""
        features, token = self._teacher(_images(pixels))
        found = {FEATURES: self.basis.reduced(features)}
        return {**found, TEACHER_TOKEN: token} if self._token and token is not None else found

    def require_basis(self, basis: Basis, given: str) -> None:
        """Raise ConfigError unless the map is one of this teacher, to this width."""
        require(
            basis.digest == self.digest,
            f"--teacher-basis {given} is of another teacher (digest {basis.digest[:12]}, this one {self.digest[:12]})",
        )
        require(
            basis.matrix.shape[1] == self.width,
            f"--teacher-basis {given} has {basis.matrix.shape[1]} components; use --teacher-width "
            f"{basis.matrix.shape[1]}",
        )

    def fit(self, batches: Iterator[Tensor]) -> Basis:
        """Return the map of the features of a sample of pixels ``[B, H, W, 3]`` uint8, evenly spread over each."""
        sample = []
        for pixels in batches:
            features, _ = self._teacher(_images(pixels))
            of_images = features.flatten(2)
            spread = torch.linspace(0, of_images.shape[2] - 1, min(_OF_IMAGE, of_images.shape[2])).round().long()
            sample.append(of_images[:, :, spread].transpose(1, 2).flatten(0, 1).cpu())
        require(bool(sample), "--teacher: the source has no usable images, whose features the map could be fitted to")
        return Basis.fit(torch.cat(sample), self.width, self.digest)


def _leading(sample: Tensor, width: int) -> Tensor:
    """Return the first right singular vectors of a sample, ``[N, W] -> [W, width]``."""
    _, vectors = torch.linalg.eigh(sample.T @ sample)  # ascending
    matrix: Tensor = vectors.flip(1)[:, :width]
    # The sign of an eigenvector is arbitrary.
    largest = matrix.gather(0, matrix.abs().argmax(0, keepdim=True))
    return matrix * largest.sign()


def _images(pixels: Tensor) -> Tensor:
    return pixels.permute(0, 3, 1, 2).float() / 255
