"""Records of frozen encoders: what the other packages need to know of an autoencoder or of text encoders.

A pipeline names its class and those of its parts in ``model_index.json``; ``registry`` finds the record by them. So an
encoder can come from another package.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from fastdiff.errors import require
from fastdiff.models.pipeline_files import PipelineFiles


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSpace:
    """The latents of an autoencoder, known without its weights in memory. They become x0 by ``(z - shift) * scale``."""

    channels: int
    """Channels C of a latent."""
    factor: int
    """Pixels per latent position, in height and in width."""
    shift: tuple[float, ...]
    """One value per channel, or per element of ``[C, side, side]``, the last dimension first. Empty: the autoencoder
    has no statistics of its own, and its latents are measured while they are encoded."""
    scale: tuple[float, ...]
    """As many values as ``shift``."""
    posterior: bool = False
    """Whether the encoder returns mean and standard deviation, of which training draws samples, instead of a latent."""
    side: int | None = None
    """Height and width of a latent, if the autoencoder takes images of one size; None: any multiple of ``factor``."""
    measured_per: Literal["channel", "element"] = "channel"
    """What has a mean and a variance of its own in its recipe, where these are measured."""
    variance_eps: float = 0.0
    """Added to a measured variance before its root, as in its recipe."""
    columns: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of what the encoder gives beside a latent, by name (``fastdiff.conditions``)."""
    pixel_channels: int = 3
    """Channels of a decoded image."""
    values_per_pixel: int
    """Values per pixel of the encoder's largest activation, which the memory of online encoding is predicted from."""

    def __post_init__(self) -> None:
        sizes = len(self.shift), len(self.scale)
        allowed = {self.channels, self.channels * (self.side or 1) ** 2, 0}
        require(
            sizes[0] == sizes[1] and sizes[0] in allowed,
            f"the LatentSpace of an autoencoder has {self.channels} channels, {sizes[0]} values of shift and "
            f"{sizes[1]} of scale, expected one per channel"
            + (f" or one per element, {max(allowed)}" if self.side else ""),
        )
        require(
            self.measured_per == "channel" or self.side is not None,
            "the LatentSpace of an autoencoder is measured per element, but its latents have no fixed side",
        )

    @property
    def has_statistics(self) -> bool:
        """Whether the autoencoder says itself how its latents become x0."""
        return bool(self.shift)


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoencoderFamily:
    """An autoencoder that a pipeline holds in ``vae/``, or that a folder holds alone."""

    title: ClassVar[str] = "an autoencoder"
    pipelines: ClassVar[tuple[str, ...]] = ()
    """It is the same in any pipeline."""
    classes: tuple[str]
    """Its class in ``model_index.json``."""
    space: Callable[[PipelineFiles], LatentSpace]
    """Describes its latents, by its ``config.json`` or by statistics among its weights."""
    load: Callable[[PipelineFiles, torch.device | str, torch.dtype], nn.Module]
    """Loads it frozen, with weights and activations of this dtype."""
    pixel_range: tuple[float, float] = (-1.0, 1.0)
    """Black and white in the images that ``encode`` takes and ``decode`` returns. Callers have [-1, 1] always."""
    encode: Callable[[Any, Tensor], Tensor]
    """Maps the module and images ``[B, 3, H, W]`` in ``pixel_range``, in its dtype, to latents ``[B, C, h, w]``
    float32, not normalised; for a posterior to ``[B, 2C, h, w]``, the mean and then the standard deviation."""
    encode_columns: Callable[[Any, Tensor], tuple[Tensor, dict[str, Tensor]]] | None = None
    """Returns what ``encode`` does and, of the same pass, the ``columns`` of the space, ``[B, ...]`` float32; None: it
    has none."""
    decode: Callable[[Any, Tensor], Tensor]
    """Maps the module and latents ``[B, C, h, w]``, not normalised, in its dtype, to images in ``pixel_range``."""


class TextEncoder(Protocol):
    """Text encoders of a pipeline with their tokenizers, on a device.

    Those of a package may also have the methods of ``CaptionTokens``, all or some.
    """

    def parameters(self) -> Iterator[Tensor]:
        """Yield the weights of all encoders."""

    def __call__(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return the conditions of N captions, ``[N, ...]`` each and of equal shape for any caption.

        A caption that is longer than the encoder's limit is truncated. A shorter one is padded; if the network must
        tell padding from text, the mask is a condition of its own: bool, with a valid token in every caption. The
        others may be of any device and floating dtype: they are moved to those that ``load`` got.
        """

    def null(self) -> dict[str, Tensor]:
        """Return the null condition of classifier-free guidance: all conditions of one caption, ``[...]`` each."""


class CaptionTokens(Protocol):
    """What text encoders tell of the tokens of captions, and of negative prompts."""

    def cut(self, captions: Sequence[str]) -> int | None:
        """Return how many tokens an encoder reads of a caption, if one of these has more; None: all are read whole.

        Not asked of an encoder that has ``lost``.
        """

    def lost(self, captions: Sequence[str]) -> Mapping[int, int]:
        """Return the tokens of these captions that are not read, by the number that is read of a caption.

        Encoders with different limits have an entry each; empty: all captions are read whole.
        """

    def lengths(self, captions: Sequence[str]) -> Sequence[int]:
        """Return how many tokens the encoder computes of each caption; batches are formed of captions of like length.

        Only for encoders that pad a batch to its longest caption.
        """

    def negative(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return the conditions of negative prompts, as ``__call__``, which is used if this is missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextEncoderFamily:
    """The text encoders of a pipeline, which work together."""

    title: ClassVar[str] = "text encoders"
    classes: tuple[str, ...]
    """Their classes in ``model_index.json``, in the order of the folders ``text_encoder``, ``text_encoder_2``, ..."""
    pipelines: tuple[str, ...] = ()
    """Classes of the pipelines that use them so (``_class_name`` in ``model_index.json``); empty: any."""
    tokens: int | None = None
    """Maximum tokens of a caption, unless ``PipelineFiles.max_tokens`` gives another; None: it is fixed."""
    fixed_tokens: int = 0
    """Rows of ``context`` beside those of ``tokens``."""
    conditions: tuple[str, ...]
    """Names of the conditions that they produce."""
    load: Callable[[PipelineFiles, torch.device | str, torch.dtype], TextEncoder]
    """Loads them frozen, with weights and activations of this dtype."""
