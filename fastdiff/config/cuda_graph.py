"""What ``--performance.cuda_graph`` refuses: every reason why a graph cannot be static, in one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastdiff.errors import require

if TYPE_CHECKING:
    from fastdiff.config.run import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What is known of a run: at first its configuration, at its start more."""

    config: RunConfig
    device: str
    """Type of its device."""
    not_flat: str = ""
    """Why it cannot have the flat engine, and the remedy; empty: it can."""
    sizes: int = 1
    """Latent sizes of its data."""


_LEAVE = "or leave --performance.cuda_graph out"
_REASONS: tuple[tuple[Callable[[Circumstances], object], str], ...] = (
    (lambda run: run.device != "cuda", "on a {run.device}: a graph holds the work of a GPU; leave the flag out"),
    (
        lambda run: run.not_flat,
        "needs the flat engine, as the hooks of DeepSpeed run on the host in every pass; there is none {run.not_flat}, "
        + _LEAVE,
    ),
    (
        lambda run: run.config.performance.profile,
        "with --performance.profile {run.config.performance.profile}: a replayed graph has none of the ranges that a "
        "profile names; profile the run without the graph",
    ),
    (
        lambda run: run.config.performance.in_order,
        "with --performance.grad_accum_order micro_batches, whose messages after each micro-batch were not tried "
        "beside graphs; leave one of them out",
    ),
    (
        lambda run: run.config.timesteps.of(run.config.objective) == "importance",
        "with --timesteps.density importance: its table follows from the losses of each step, and a graph holds that "
        f"of its capture; use another density, {_LEAVE}",
    ),
    (
        lambda run: run.config.data.online,
        "with --data.online: the encoders use the GPU during the capture; write shards with `fastdiff encode`, "
        + _LEAVE,
    ),
    (
        lambda run: run.sizes > 1,
        "with {run.config.data.described}, whose latents have {run.sizes} sizes: a graph has the shapes of one; encode "
        f"with one size, {_LEAVE}",
    ),
)
"""What is in the way, and the words for it."""


def require_static(run: Circumstances) -> None:
    """Raise ConfigError with the first reason why no graph can hold a run; a run without graphs may do anything."""
    if run.config.performance.cuda_graph:
        for is_there, words in _REASONS:
            require(not is_there(run), f"--performance.cuda_graph {words.format(run=run)}")


def require_static_config(config: RunConfig) -> None:
    """The same for what the configuration alone says."""
    asked = config.performance
    without = "with --performance.engine deepspeed: use flat with --deepspeed_config ddp"
    require_static(
        Circumstances(
            config=config,
            device="cpu" if asked.device == "cpu" else "cuda",
            not_flat=without if asked.engine == "deepspeed" else "",
        )
    )
