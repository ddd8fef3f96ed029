"""How the published pipeline of a network draws: what its code says beside the scheduler's configuration."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Mu = Callable[[Mapping[str, Any], int, int], float]
"""Logarithm of the time shift, from the scheduler's configuration, the tokens of a picture and the steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSettings:
    """Defaults of a pipeline of diffusers; the size of its pictures is that of the network's configuration."""

    steps: int = 50
    """Denoising steps (``num_inference_steps``)."""
    guidance: float = 1.5
    """Scale of ``uncond + scale * (cond - uncond)``; a pipeline that adds to ``cond`` calls it one less."""
    negative: str | None = None
    """Negative prompt of the usual guidance; None: the unconditional embedding of the text encoders."""
    norm_patch: int | None = None
    """Side of the square of latents, a token, whose guided prediction gets the norm of the conditional one; None: the
    norm is not changed."""
    mu: Mu | None = None
    """Of schedulers with ``use_dynamic_shifting``; None: their shift is in the scheduler's configuration, if any."""
    even_sigmas: bool = False
    """Whether the pipeline gives the scheduler sigmas, even from 1 to 1 / steps, instead of the number of steps."""
    distilled_steps: int | None = None
    """Steps of a pipeline with ``is_distilled`` in its index, which draws without guidance; None: there is no such."""


def linear_mu(scheduler: Mapping[str, Any], tokens: int, steps: int) -> float:
    """Return a mu that is linear in the tokens, through two points of the scheduler's configuration (Flux.1)."""
    few, many = scheduler.get("base_image_seq_len", 256), scheduler.get("max_image_seq_len", 4096)
    low, high = scheduler.get("base_shift", 0.5), scheduler.get("max_shift", 1.15)
    return float(low + (high - low) * (tokens - few) / (many - few))
