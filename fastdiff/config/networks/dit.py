"""Shape of the diffusion transformer (DiT), with the published sizes. This module imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fastdiff.conditions import Shape
from fastdiff.config.networks.base_width import require_heads_of_base
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.networks.routing import ROUTINGS, Route, RoutingName
from fastdiff.errors import ConfigError, require


@dataclass(frozen=True, kw_only=True, slots=True)
class DiTConfig(ModelConfig):
    """A diffusion transformer (Peebles & Xie 2023, arXiv:2212.09748)."""

    kind: Literal["dit"] = "dit"
    """Kind of the network; not to be changed."""
    depth: int = 28
    """Number of transformer blocks."""
    hidden: int = 1152
    """Width of a token."""
    heads: int = 16
    """Attention heads."""
    patch: int = 2
    """Height and width of a patch, in latent pixels."""
    channels: int = 4
    """Channels of the latents."""
    size: int = 32
    """Height and width of the latents."""
    classes: int = 1000
    """Number of classes, without the null class of classifier-free guidance."""
    mlp_ratio: float = 4.0
    """Width of the MLP relative to the width of a token."""
    learn_sigma: bool = False
    """Double the output channels, as in the published checkpoints; the second half predicts the variance."""
    head_dim: int = 0
    """Channels of an attention head; 0: model.hidden / model.heads."""
    norm: Literal["layer", "rms", "rms-weight"] = "layer"
    """Norm of a token: layer norm, or RMSNorm (arXiv:1910.07467) without or with a learned weight per channel."""
    norm_eps: float = 1e-6
    """Number that the norm of a token adds to the variance or mean square."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """MLP: two layers with GELU, or SwiGLU (arXiv:2002.05202) of two thirds of the width."""
    positions: Literal["sincos", "none"] = "sincos"
    """Fixed position embedding that is added to the patches once; none: only model.rotary tells them apart."""
    rotary: bool = False
    """Rotate queries and keys by the row and column of their patch (RoPE, arXiv:2104.09864, in two dimensions)."""
    qk_norm: bool = False
    """RMSNorm of each query and key per head, with a learned weight, before the rotation (arXiv:2010.04245)."""
    qk_norm_eps: float = 1e-6
    """Number that model.qk_norm adds to the mean square; 1.1920929e-7 is that of torch in fp32 if none is given."""
    value_residual: bool = False
    """Mix the values of block 0 into those of the later blocks, by a learned share per block (arXiv:2410.17897)."""
    modulation: Literal["adaln", "adaln-single"] = "adaln"
    """Shifts, scales and gates: a linear layer per block, or one for all and a table per block (arXiv:2310.00426)."""
    in_context: int = 0
    """Tokens of the class beside the patches, with learned positions (in-context tokens, arXiv:2511.13720)."""
    in_context_from: int = 0
    """First block that has the class tokens, counted from 0."""
    patch_bottleneck: int = 0
    """Width of a patch between the two layers of its embedding (arXiv:2511.13720); 0: one layer."""
    teacher_width: int = 0
    """Width of the class token of a teacher, noised and predicted beside the patches (arXiv:2507.01467): that of the
    column teacher_token of the data; 0: none."""
    teacher_norm: bool = False
    """RMSNorm with a weight of the embedded class token of the teacher (SR-DiT)."""
    teacher_zero: bool = False
    """Start the layer that predicts the class token of the teacher at zero (SR-DiT), as that of the patches."""
    base_width: int = 0
    """Width of the DiT whose learning rate is given (muP, arXiv:2505.15270): that of hidden matrices is divided by
    model.hidden / model.base_width, initial weights and output are scaled to match; 0: without muP."""
    routing: RoutingName = "none"
    """Leave tokens out of the middle blocks in training: tread (arXiv:2501.04765: they come back as they were) or
    sprint (arXiv:2510.21986: a learned token stands for them, and a layer joins it with the output of the first
    blocks). Sampling and evaluation take all tokens."""
    routing_share: float | None = None
    """Share of the tokens that is left out, drawn for each sample. None: 0.5 (tread), 0.75 (sprint)."""
    routing_from: int = 2
    """First block that leaves tokens out, counted from 0."""
    routing_to: int | None = None
    """Last block that leaves tokens out. None: all but 3 (tread) or 2 (sprint) behind."""
    path_drop: float | None = None
    """Probability that an optimizer step loses the output of the blocks that leave tokens out (sprint); under guidance
    the unconditional prediction does without it. None: 0.05."""
    dense_share: float = 0.0
    """Share of the training, at its end, in which no token is left out; 0.1-0.25 is usual."""

    aligned_width: int = 0
    """Width of the features of a teacher in the data (`fastdiff encode --teacher`), to which a head projects those of a
    block in training (REPA, arXiv:2410.06940); 0: none."""
    aligned_block: int = 8
    """Block with these features, counted from 1: 8 in REPA."""
    aligned_hidden: int = 2048
    """Features of the two hidden layers of the head."""
    aligned_token: bool = False
    """Align the class token of model.teacher_width beside the patches, by the same head (SR-DiT): the loss is the mean
    over all of them."""

    family: ClassVar[str] = "fastdiff.models.dit.family:DIT"
    title: ClassVar[str] = "a DiT"
    lora_targets: ClassVar[tuple[str, ...]] = ("attn.qkv", "attn.proj")
    hidden_matrices: ClassVar[tuple[str, ...]] = (
        "attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight", "mlp.w12.weight", "mlp.w3.weight",
        "t_embedder.mlp.2.weight", "adaLN_modulation.1.weight", "t_block.1.weight", "fusion_proj.weight",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name in ("depth", "hidden", "heads", "patch", "channels", "size", "classes"):
            require(getattr(self, name) >= 1, f"--model.{name} {getattr(self, name)}: at least 1")
        for name in ("head_dim", "in_context", "in_context_from", "patch_bottleneck", "teacher_width"):
            require(getattr(self, name) >= 0, f"--model.{name} {getattr(self, name)}: at least 0")
        for name in ("norm_eps", "qk_norm_eps"):
            given = getattr(self, name)
            require(0 < given < 1, f"--model.{name} {given}: a number between 0 and 1; 1e-6 is usual")
        require(
            1 <= self.hidden * self.mlp_ratio < math.inf and self.inner >= 1,
            f"--model.mlp_ratio {self.mlp_ratio}: a number above 0; 4 is usual",
        )
        require(
            bool(self.head_dim) or self.hidden % self.heads == 0,
            f"--model.hidden {self.hidden} is not divisible by --model.heads {self.heads}; "
            f"choose a multiple, for example {self.hidden // self.heads * self.heads or self.heads}",
        )
        require(
            self.size % self.patch == 0,
            f"--model.size {self.size} is not divisible by --model.patch {self.patch}; choose a divisor of the size of "
            "the images as the patch, or encode with another --resolution",
        )
        self._check_positions()
        self._check_in_context()
        for name in ("teacher_norm", "teacher_zero"):
            require(
                self.teacher_width > 0 or not getattr(self, name),
                f"--model.{name} without --model.teacher_width: there is no token; give its width, or leave it out",
            )
        require_heads_of_base(self.base_width, self.hidden, self.heads, self.head_width)
        self._check_routing()
        self._check_alignment()

    def _check_alignment(self) -> None:
        for name, least in (("aligned_width", 0), ("aligned_block", 1), ("aligned_hidden", 1)):
            require(getattr(self, name) >= least, f"--model.{name} {getattr(self, name)}: at least {least}")
        require(
            not self.aligned_width or self.aligned_block <= self.depth,
            f"--model.aligned_block {self.aligned_block}: the network has {self.depth} blocks",
        )
        require(
            not self.aligned_width or self.route is None or self.aligned_block - 1 not in self.route.blocks,
            f"--model.aligned_block {self.aligned_block}, counted from 1, is among the blocks that leave tokens out; "
            "choose one in front of them or behind",
        )
        require(
            not (self.aligned_width and self.base_width),
            f"--model.aligned_width {self.aligned_width} with --model.base_width {self.base_width}: how the gradient "
            "of the alignment grows with the width beside that of the loss is not known, so a learning rate may not "
            "carry over; leave one of them out",
        )
        require(
            not self.aligned_token or 0 < self.teacher_width == self.aligned_width,
            f"--model.aligned_token with --model.teacher_width {self.teacher_width} and --model.aligned_width "
            f"{self.aligned_width}: one head projects the class token and the patches, so both are the width of the "
            "teacher, as `fastdiff encode --teacher-width 0 --teacher-token` stores them; set them so, or give "
            "--model.no-aligned-token",
        )

    def _check_positions(self) -> None:
        require(
            self.positions == "none" or self.hidden % 4 == 0,
            f"--model.hidden {self.hidden} must be divisible by 4 (the sin-cos position embedding)",
        )
        require(
            self.positions != "none" or self.rotary,
            "--model.positions none without --model.rotary: nothing would tell the network where a patch lies",
        )
        require(
            not self.rotary or self.head_width % 4 == 0,
            f"--model.rotary rotates pairs of channels by rows and by columns: heads have {self.head_width} channels, "
            "expected a multiple of 4; change --model.heads or --model.head_dim",
        )

    def _check_in_context(self) -> None:
        first = self.in_context_from
        require(
            first == 0 or (self.in_context > 0 and first < self.depth),
            f"--model.in_context_from {first}: there are "
            + (f"{self.depth} blocks, expected less" if self.in_context else "no class tokens (--model.in_context)"),
        )
        require(
            first == 0 or not self.value_residual,
            f"--model.value_residual with --model.in_context_from {first}: block 0 has no values of the class "
            "tokens; use --model.in_context_from 0, or leave one of them out",
        )

    def _check_routing(self) -> None:
        route, first = self.route, self.routing_from
        if route is None:
            for name, usual in _OF_ROUTING.items():
                given = getattr(self, name)
                require(
                    given == usual,
                    f"--model.{name} {given} without --model.routing: no token is left out; set it to tread or "
                    "sprint, or leave this out",
                )
            return
        last = route.blocks.stop - 1
        require(
            0 <= first <= last < self.depth,
            f"--model.routing {self.routing} leaves tokens out of blocks {first} to {last}, the network has 0 to "
            f"{self.depth - 1}: set --model.routing_from and --model.routing_to",
        )
        share = self.routing_share
        require(share is None or 0 < share < 1, f"--model.routing_share {share}: above 0 and below 1")
        require(0 <= self.dense_share < 1, f"--model.dense_share {self.dense_share}: from 0 to below 1")
        require(
            self.path_drop is None or ROUTINGS[self.routing].path_drop is not None,
            f"--model.path_drop {self.path_drop}: --model.routing {self.routing} has no path that can be lost; "
            "use sprint, or leave it out",
        )
        require(
            self.path_drop is None or 0 <= self.path_drop < 1, f"--model.path_drop {self.path_drop}: from 0 to below 1"
        )
        require(
            not self.value_residual or first > 0,
            "--model.value_residual with --model.routing_from 0: block 0 has no values of the tokens that are left "
            "out; use --model.routing_from 1 or more",
        )
        require(
            not self.in_context or self.in_context_from not in route.blocks,
            f"--model.in_context_from {self.in_context_from} is among the blocks that leave tokens out, {first} to "
            f"{last}: their number must be that of the block before; change --model.routing_from or "
            "--model.routing_to",
        )

    @property
    def route(self) -> Route | None:
        """Tokens that are left out in training; None: none are."""
        kind = ROUTINGS.get(self.routing)
        if kind is None:
            return None
        last = self.depth - 1 - kind.behind if self.routing_to is None else self.routing_to
        share = kind.share if self.routing_share is None else self.routing_share
        tokens = self.tokens(self.routing_from)
        return Route(
            tokens=tokens,
            kept=kind.kept(tokens, share),
            blocks=range(self.routing_from, last + 1),
            path_drop=kind.path_drop if self.path_drop is None else self.path_drop,
            dense_share=self.dense_share,
        )

    @property
    def head_width(self) -> int:
        """Channels of an attention head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def inner(self) -> int:
        """Width of the MLP between its layers, behind the gate of a SwiGLU."""
        wide = int(self.hidden * self.mlp_ratio)
        return int(2 / 3 * wide) if self.mlp == "swiglu" else wide

    @property
    def side(self) -> int:
        """Patches per row and column."""
        return self.size // self.patch

    @property
    def aligned_shape(self) -> Shape:
        """One feature per patch."""
        return (self.aligned_width, self.side, self.side) if self.aligned_width else ()

    @property
    def leading(self) -> int:
        """Tokens in front of the patches in every block."""
        return 1 if self.teacher_width else 0

    def tokens(self, block: int) -> int:
        """Return the tokens per sample in a block, counted from 0."""
        return self.side**2 + self.leading + (self.in_context if block >= self.in_context_from else 0)

    @property
    def conditions(self) -> Mapping[str, Shape]:
        """The class; if there are some, the noisy class token of the teacher and what leaves tokens out."""
        route = self.route
        return {
            "label": (),
            **({"teacher_token": (self.teacher_width,)} if self.teacher_width else {}),
            **({"token_scores": (route.tokens,)} if route else {}),
            **({"sparse_path": ()} if self.has_sparse_path else {}),
        }

    @property
    def options(self) -> str:
        """Flags of what the DiT of Peebles & Xie lacks; empty: it is that network."""
        plain = _PLAIN | {"head_dim": self.head_dim and self.hidden / self.heads}
        if self.has_sparse_path:
            plain["routing"] = "none"
        given = {name: getattr(self, name) for name in plain if getattr(self, name) != plain[name]}
        return " ".join(
            f"--model.{name}" if value is True else f"--model.{name} {value}" for name, value in given.items()
        )


_PLAIN: dict[str, Any] = {
    "head_dim": 0, "norm": "layer", "norm_eps": 1e-6, "mlp": "gelu", "positions": "sincos", "rotary": False,
    "qk_norm": False, "value_residual": False, "modulation": "adaln", "in_context": 0, "patch_bottleneck": 0,
    "teacher_width": 0, "base_width": 0,
}  # fmt: skip
"""Options that the published DiT lacks, as it is."""


_OF_ROUTING: dict[str, Any] = {
    "routing_share": None, "routing_from": 2, "routing_to": None, "path_drop": None, "dense_share": 0.0,
}  # fmt: skip
"""Options of ``--model.routing``, by default."""


DIT_SIZES: dict[str, tuple[int, int, int]] = {
    "S": (12, 384, 6),
    "B": (12, 768, 12),
    "L": (24, 1024, 16),
    "XL": (28, 1152, 16),
}
"""Depth, hidden width and heads of the published sizes (table 1 of Peebles & Xie 2023)."""

DIT_PATCHES = (2, 4, 8)
"""Patch sides of the published models."""


def dit_config(name: str, *, size: int = 32, learn_sigma: bool = False) -> DiTConfig:
    """Return the configuration of a published size, from ``"DiT-S/2"`` to ``"DiT-XL/8"``; ConfigError for other names.

    ``size`` is height and width of the latents: 32 for images of 256 px, 64 for 512 px.
    """
    names = {f"DiT-{letter}/{patch}": (letter, patch) for letter in DIT_SIZES for patch in DIT_PATCHES}
    if name not in names:
        raise ConfigError(f"model {name!r} is unknown; choose one of {', '.join(names)}")
    letter, patch = names[name]
    depth, hidden, heads = DIT_SIZES[letter]
    return DiTConfig(depth=depth, hidden=hidden, heads=heads, patch=patch, size=size, learn_sigma=learn_sigma)
