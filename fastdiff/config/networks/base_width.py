"""Base width of muP: that of the network whose learning rate wider ones take over. This module imports no torch."""

from fastdiff.errors import require


def require_heads_of_base(base: int, hidden: int, heads: int, head_width: int) -> None:
    """Raise ConfigError unless the width grows by heads alone, from a base width (0: none) of whole heads."""
    require(base >= 0, f"--model.base_width {base}: at least 0")
    require(
        base == 0 or heads * head_width == hidden,
        f"--model.base_width {base}: the width grows by its heads, and {heads} heads of {head_width} channels are not "
        f"--model.hidden {hidden}; leave out --model.head_dim, or --model.base_width",
    )
    require(
        base % head_width == 0,
        f"--model.base_width {base} is no multiple of {head_width}, the channels of a head, which are equal at every "
        f"width; give {max(1, round(base / head_width)) * head_width}, or change --model.heads",
    )
