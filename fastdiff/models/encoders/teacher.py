"""A frozen vision model of transformers as a teacher: DINOv2, DINOv3, SigLIP, CLIP, or a convolutional one.

A network is aligned with its patch features (REPA; Yu et al. 2024, arXiv:2410.06940). Images are normalised as its
processor does, and resized by bicubic interpolation without antialiasing, as the authors do; antialiasing would give
other features.
"""

import hashlib
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.errors import ConfigError, require

_PROBE = 448
"""Pixels per side of the image that shows what a model gives; a multiple of the patches and strides in use."""


class Teacher:
    """A vision model and the features that it gives for images.

    Args:
        source: folder, or id on the Hugging Face hub.
        side: features per side of an image.
        device: of the model.
        dtype: of its weights and activations.

    Raises:
        ConfigError: it cannot be loaded, is no vision model, or does not give ``side * side`` features.
    """

    def __init__(self, source: str, side: int, device: torch.device, dtype: torch.dtype) -> None:
        self._source = source
        self.side = side
        """Features per side of an image."""
        model = _vision_part(_loaded(source)).eval().requires_grad_(False)
        self.digest = _digest(model)
        """Of its weights."""
        self._model = model.to(device, dtype)
        self._options = _options(self._model)
        mean, deviation = _normalisation(source)
        self._mean, self._deviation = (torch.tensor(value, device=device).view(-1, 1, 1) for value in (mean, deviation))
        self._dtype = dtype
        self.device = device
        """Of the model."""
        self._pixels = side * self._pixels_of_patch()
        patches, token = self(torch.zeros(1, len(mean), self._pixels, self._pixels))
        self.width = patches.shape[1]
        """Numbers of a feature."""
        self.has_token = token is not None
        """Whether it gives a class token."""

    @torch.no_grad()
    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the last hidden states of images.

        Args:
            images: ``[B, 3, H, W]`` fp32 in [0, 1].

        Returns:
            ``[B, W, side, side]`` of the patches, and ``[B, W]`` of the class token, fp32; None: it has none.
        """
        images = (images.to(self.device) - self._mean) / self._deviation
        size = (self._pixels, self._pixels)
        if images.shape[2:] != size:
            images = F.interpolate(images, size=size, mode="bicubic", align_corners=False, antialias=False)
        states = self._model(pixel_values=images.to(self._dtype), **self._options).last_hidden_state.float()
        if states.dim() == 4:
            return self._checked(states), None
        leading = states.shape[1] - self.side**2
        require(leading >= 0, self._other_count(states.shape[1]))
        patches = states[:, leading:].transpose(1, 2).unflatten(2, (self.side, self.side))
        return self._checked(patches), states[:, 0] if leading else None

    def _checked(self, patches: Tensor) -> Tensor:
        require(patches.shape[2:] == (self.side, self.side), self._other_count(patches.shape[2] * patches.shape[3]))
        return patches.contiguous()

    def _other_count(self, found: int) -> str:
        return (
            f"--teacher {self._source} gives {found} features of an image of {self._pixels} pixels, expected "
            f"{self.side} x {self.side}; use another --teacher-side"
        )

    @torch.no_grad()
    def _pixels_of_patch(self) -> int:
        """Return the pixels per side of a patch; of a convolutional model, its stride."""
        probe = torch.zeros(1, len(self._mean), _PROBE, _PROBE, device=self.device, dtype=self._dtype)
        states = self._model(pixel_values=probe, **self._options).last_hidden_state
        if states.dim() == 4:
            return _PROBE // int(states.shape[-1])
        patch = getattr(self._model.config, "patch_size", None)
        if not isinstance(patch, int):
            raise ConfigError(f"--teacher {self._source} has no patch_size in its configuration, given {patch}")
        return patch


def _loaded(source: str) -> nn.Module:
    from transformers import AutoModel

    try:
        found: nn.Module = AutoModel.from_pretrained(source, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"--teacher {source} cannot be loaded ({reason}); expected a folder or the id of a vision model of "
            "transformers, such as facebook/dinov2-base"
        ) from None
    return found


def _digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(name.encode())
        found.update(value.contiguous().numpy().tobytes())
    return found.hexdigest()


def _vision_part(model: Any) -> Any:
    """Return the image encoder of a model of images and texts, or the model itself."""
    part = getattr(model, "vision_model", model)
    require(
        "pixel_values" in inspect.signature(part.forward).parameters,
        f"--teacher: {type(part).__name__} takes no images; expected a vision model such as DINOv2 or SigLIP",
    )
    return part


def _options(model: Any) -> dict[str, bool]:
    """Return the arguments with which it takes images of other sizes than those of its training."""
    name = "interpolate_pos_encoding"
    return {name: True} if name in inspect.signature(model.forward).parameters else {}


def _normalisation(source: str) -> tuple[list[float], list[float]]:
    """Return mean and deviation of its images in [0, 1] by channel."""
    from transformers import AutoImageProcessor

    try:
        found = AutoImageProcessor.from_pretrained(source).to_dict()
    except (OSError, ValueError, KeyError):
        raise ConfigError(
            f"--teacher {source} has no preprocessor_config.json, which holds the normalisation of its images; add the "
            "file of the model"
        ) from None
    if not found.get("do_normalize", True):
        return [0.0] * 3, [1.0] * 3
    mean, deviation = list(found["image_mean"]), list(found["image_std"])
    require(
        found.get("do_rescale", True) and abs(found.get("rescale_factor", 1 / 255) * 255 - 1) < 1e-6,
        f"--teacher {source}: its images are not in [0, 1] before the normalisation (rescale_factor "
        f"{found.get('rescale_factor')}); expected 1/255",
    )
    return mean, deviation
