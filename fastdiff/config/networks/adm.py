"""Shape of the UNet of IDDPM and ADM, as a frozen dataclass. This module imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from fastdiff.conditions import Shape
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.errors import require

QkvOrder = Literal["head_major", "qkv_major"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmConfig(ModelConfig):
    """The UNet of IDDPM and ADM, in pixel space.

    Nichol & Dhariwal 2021, arXiv:2102.09672; Dhariwal & Nichol 2021, arXiv:2105.05233.
    """

    kind: Literal["adm"] = "adm"
    """Kind of the network; not to be changed."""
    channels: int = 3
    """Channels of the images."""
    size: int = 64
    """Height and width of the images."""
    width: int = 128
    """Base number of channels, multiplied by ``channel_mult`` (num_channels in the published scripts)."""
    channel_mult: tuple[float, ...] = (1, 2, 3, 4)
    """Channels of each level as multiples of the width, the finest level first."""
    res_blocks: int = 3
    """Residual blocks of each level of the encoder; the decoder has one more per level."""
    attention_resolutions: tuple[int, ...] = (16, 8)
    """Heights of the feature maps with attention after each residual block; the middle block always has attention."""
    heads: int = 4
    """Attention heads."""
    head_channels: int = 0
    """Channels of each attention head, instead of ``heads``; 0: use ``heads``."""
    qkv_order: QkvOrder = "head_major"
    """Order of the output channels of each ``qkv``. head_major: query, key and value of the first head, then of the
    next (IDDPM, ADM). qkv_major: the queries of all heads, then the keys, then the values (use_new_attention_order in
    ADM's scripts, used by its 64 x 64 network). The shapes of the weights are the same."""
    classes: int = 0
    """Number of classes; 0: unconditional. The null class adds nothing to the time embedding, so it has no row."""
    dropout: float = 0.0
    """Dropout rate before the last convolution of a residual block."""
    scale_shift_norm: bool = True
    """Time and class embeddings scale and shift the second norm of a residual block; otherwise they are added before
    it."""
    resblock_updown: bool = False
    """Resample inside residual blocks (ADM, BigGAN), instead of with strided convolutions and with upsampling followed
    by a convolution (IDDPM)."""
    low_res_size: int = 0
    """Height and width of the low-resolution input (super-resolution); 0: none."""
    learn_sigma: bool = False
    """Double the output channels; the second half predicts the variance."""
    norm_num_groups: int = 32
    """Groups of every group normalisation."""

    family: ClassVar[str] = "fastdiff.models.adm.family:ADM"
    title: ClassVar[str] = "an ADM UNet"
    in_pixels: ClassVar[bool] = True
    needs_classes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("channels", "size", "width", "res_blocks", "heads", "norm_num_groups"):
            require(getattr(self, name) >= 1, f"--model.{name} {getattr(self, name)}: at least 1")
        for name in ("head_channels", "classes", "low_res_size"):
            require(getattr(self, name) >= 0, f"--model.{name} {getattr(self, name)}: at least 0")
        require(0 <= self.dropout < 1, f"--model.dropout {self.dropout}: at least 0, below 1")
        require(bool(self.channel_mult), "--model.channel_mult: one entry per level")
        require(self.width % 2 == 0, f"--model.width {self.width} must be even (half sines, half cosines)")
        factor = self.smallest_factor
        require(
            self.size % factor == 0,
            f"--model.size {self.size} must be divisible by {factor}, because {len(self.channel_mult)} levels halve it "
            f"{len(self.channel_mult) - 1} times",
        )
        for width in (self.width, *self.widths):
            require(
                width > 0 and width % self.norm_num_groups == 0,
                f"--model.width {self.width} and --model.channel_mult {self.channel_mult} give a level of {width} "
                f"channels, which must be divisible by --model.norm_num_groups {self.norm_num_groups}",
            )
        sizes = tuple(self.size >> level for level in range(len(self.widths)))
        strange = [size for size in self.attention_resolutions if size not in sizes]
        require(
            not strange,
            f"--model.attention_resolutions {self.attention_resolutions}: the maps have sizes {sizes}, not {strange}",
        )
        for width, size in zip(self.widths, sizes, strict=True):
            if size not in self.attention_resolutions and width != self.widths[-1]:
                continue
            heads = self.heads_of(width)
            require(
                heads > 0 and width % heads == 0 and (not self.head_channels or heads * self.head_channels == width),
                f"--model.{'head_channels' if self.head_channels else 'heads'} "
                f"{self.head_channels or self.heads} does not divide the {width} channels of a level with attention",
            )
        require(
            self.low_res_size < self.size,
            f"--model.low_res_size {self.low_res_size}: smaller than --model.size {self.size}, or 0",
        )

    @property
    def conditions(self) -> Mapping[str, Shape]:
        """Class, position (the key of the dropout) and, for super-resolution, the small image."""
        side = self.low_res_size
        return {"label": (), **({"low_res": (self.channels, side, side)} if side else {}), "position": ()}

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each level."""
        return tuple(int(factor * self.width) for factor in self.channel_mult)

    @property
    def smallest_factor(self) -> int:
        """Required divisor of the height and width of the images."""
        return int(2 ** (len(self.channel_mult) - 1))

    def heads_of(self, width: int) -> int:
        """Return the attention heads of a level with ``width`` channels."""
        return width // self.head_channels if self.head_channels else self.heads
