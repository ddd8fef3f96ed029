"""Messages of a step with one micro-batch: of the flat engine at stage 0, of DeepSpeed 0.19 at ZeRO stages 1 to 3.

In units of the parameters' bytes a rank sends ``2 (W - 1) / W`` at stage 0 (an all-reduce of the gradients) and at
stage 3 ``3 (W - 1) / W`` if every parameter is gathered twice and its gradient scattered (Rajbhandari et al., "ZeRO",
2020, section 7). DeepSpeed differs from the paper in two places:

- At stages 1 and 2 it all-reduces the gradients, of which each rank keeps its part, and gathers the parameters: 3
  instead of 2 units. ``use_multi_rank_bucket_allreduce: false`` reduces to the owner of each part instead.
- At stage 3 a parameter that is used again within ``stage3_max_reuse_distance`` elements is not released between the
  passes, so a model of up to half that size is gathered once. A parameter up to the persistence threshold is gathered
  separately, after the optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch

from fastdiff.config.networks.registry import ModelConfig
from fastdiff.errors import ConfigError
from fastdiff.models.build import build_model
from fastdiff.planning.scaling.communication import Message, Part

_WHOLE_BUCKET = 64 * 2**20
"""Bytes of the compute parameters in a bucket at stage 0, of ``training.engines.data_parallel``."""
_ALIGNED_FLAT = 64
"""Elements; every parameter in the flat buffers of stage 0 is padded to a multiple."""
_ALIGNED = 2
"""Elements; a rank's part of the flat parameters of stages 1 and 2 is padded to a multiple."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero:
    """Communication settings of a DeepSpeed JSON; the defaults are DeepSpeed's."""

    stage: int
    reduce_bucket: int = 500_000_000
    """Elements of a gradient bucket."""
    prefetch_bucket: int = 50_000_000
    """Elements of a gather bucket."""
    persistence_threshold: int = 100_000
    """Largest parameter, in elements, that stays whole on every rank at stage 3."""
    reuse_distance: int = 1_000_000_000
    overlap: bool = False
    """Whether messages overlap the passes; DeepSpeed's default is True at stage 3, and so does the flat engine."""
    offload: bool = False
    """Whether the optimizer's states and its step are on the host."""
    in_order: bool = False
    """Whether gradients are added up in the order of the micro-batches (``training.engines.ordered_sum``)."""

    @classmethod
    def of(cls, ds_config: Mapping[str, Any]) -> Zero:
        """Read a DeepSpeed JSON; ConfigError: the model does not cover its communication."""
        section = dict(ds_config.get("zero_optimization", {}))
        if not section.get("use_multi_rank_bucket_allreduce", True) or not section.get("reduce_scatter", True):
            raise ConfigError(
                "the DeepSpeed JSON sets use_multi_rank_bucket_allreduce or reduce_scatter to false, which the "
                "communication model does not cover; use --deepspeed_config zero1, zero2 or zero3"
            )
        if _on_host(section, "offload_param"):
            raise ConfigError(
                "the DeepSpeed JSON sets offload_param: the communication model does not cover transfers of parameters "
                "from the host; use --deepspeed_config zero1, zero2 or zero3"
            )
        names = {
            "reduce_bucket": "reduce_bucket_size",
            "prefetch_bucket": "stage3_prefetch_bucket_size",
            "persistence_threshold": "stage3_param_persistence_threshold",
            "reuse_distance": "stage3_max_reuse_distance",
        }
        given = {field: int(section[name]) for field, name in names.items() if name in section}
        stage, overlap = int(section.get("stage", 0)), section.get("overlap_comm")
        return cls(
            stage=stage,
            overlap=stage in (0, 3) if overlap is None else bool(overlap),
            offload=_on_host(section, "offload_optimizer"),
            in_order=False,  # the run says it
            **given,
        )

    def messages(
        self, parameters: Sequence[int], width: int, ranks: int, sums: int | None = None, frozen: Sequence[int] = ()
    ) -> list[Message]:
        """Return the collectives of a step.

        Not among them: the map of used parameters that DDP adds up at stage 0 (4 bytes per parameter tensor), and what
        DeepSpeed sends for the norm when the optimizer is on the host.

        Args:
            parameters: elements of each trained one, in the order of the model. Their gradients are assumed to be
                ready in reverse order; if autograd has another order, the buckets have other borders.
            width: bytes per element of the compute parameters.
            ranks: number of ranks.
            sums: bytes per element of the gradients when they are added up; None: ``width``.
            frozen: elements of each frozen parameter, which ZeRO-3 gathers too; taken to come before the trained ones.
        """
        sums = sums or width
        if self.in_order:
            return [*self._in_order(parameters, frozen, width, ranks, sums)]
        if self.stage == 0:
            when: Part = "backward" if self.overlap else "step"
            padded = [_padded(size, _ALIGNED_FLAT) for size in parameters]
            buckets = [*_filled(padded, _WHOLE_BUCKET // width)]
            return [Message("all-reduce", sums * size, when) for size in reversed(buckets)]
        if self.stage < 3:
            parts = _buckets(parameters[::-1], self.reduce_bucket)
            part: Part = "backward" if self.overlap else "step"
            whole = _padded(sum(parameters), _ALIGNED * ranks)
            return [
                *(Message("all-reduce", sums * size, part) for size in parts),
                Message("all-reduce", 4),  # the norm of the gradients
                Message("all-gather", width * whole),
            ]
        messages = self._stage_3(parameters, frozen, width, ranks, sums)
        return [message if self.overlap else replace(message, part="step") for message in messages]

    def _in_order(
        self, parameters: Sequence[int], frozen: Sequence[int], width: int, ranks: int, sums: int
    ) -> Iterator[Message]:
        """Yield those with sums in one order: every micro-batch sends its gradient as it is, beside no pass."""
        if self.stage == 0:
            whole = sum(_padded(size, _ALIGNED_FLAT) for size in parameters)
            yield Message("all-to-all", width * whole, "backward")
            yield Message("all-gather", sums * whole)  # the same bytes are sent by broadcasts of slices
            return
        for size in _buckets(parameters[::-1], self.reduce_bucket):
            yield Message("all-to-all", width * size, "backward")
        yield from (Message("all-reduce", size) for size in (4, 16))  # for the norm
        if self.stage == 3:
            others = self._stage_3(parameters, frozen, width, ranks, width)
            yield from (message for message in others if message.kind == "all-gather")
        else:
            yield Message("all-gather", width * _padded(sum(parameters), _ALIGNED * ranks))

    def slices(self, parameters: Sequence[int], ranks: int) -> Iterator[list[int]]:
        """Yield of each trained parameter, in the order of the model, the elements that each rank updates."""
        part, start = _padded(sum(parameters), _ALIGNED * ranks) // ranks, 0
        for size in parameters:
            if self.stage == 0:
                yield [size] * ranks
            elif self.stage < 3:
                borders = (min(max(part * rank, start), start + size) for rank in range(ranks + 1))
                yield [last - first for first, last in pairwise(borders)]
            else:
                own = _padded(size, ranks) // ranks
                yield [max(0, min(own, size - own * rank)) for rank in range(ranks)]
            start += size

    def _stage_3(
        self, parameters: Sequence[int], frozen: Sequence[int], width: int, ranks: int, sums: int
    ) -> Iterator[Message]:
        everyone = [*frozen, *parameters]
        padded = [_padded(size, ranks) for size in parameters]
        persistent = [size <= self.persistence_threshold for size in everyone]
        # The parameters after it lie between its two uses, once forward and once backward.
        behind = list(accumulate(reversed(everyone), initial=0))[-2::-1]
        gathered = [_padded(size, ranks) for size in everyone]
        first = [size for size, whole in zip(gathered, persistent, strict=True) if not whole]
        second = [
            size
            for size, whole, others in zip(gathered, persistent, behind, strict=True)
            if not whole and 2 * others > self.reuse_distance
        ]
        passes: tuple[tuple[list[int], Part], ...] = ((first, "forward"), (second[::-1], "backward"))
        for sizes, part in passes:
            yield from (Message("all-gather", width * size, part) for size in _buckets(sizes, self.prefetch_bucket))
        for size in _buckets(padded[::-1], self.reduce_bucket):
            yield Message("reduce-scatter", sums * size, "backward")
        yield Message("all-reduce", 4)  # the norm of the gradients
        kept = sum(size for size, whole in zip(padded, persistent[len(frozen) :], strict=True) if whole)
        if kept:
            yield Message("all-gather", width * kept)


def _on_host(section: Mapping[str, Any], name: str) -> bool:
    return bool((section.get(name) or {}).get("device", "none") != "none")


def parameters_of(model: ModelConfig) -> list[int]:
    """Return the elements of each parameter of a network, in its order."""
    with torch.device("meta"):
        return [parameter.numel() for parameter in build_model(model).parameters()]


def width_of(precision: str) -> int:
    """Return the bytes per element of a precision."""
    return 4 if precision == "fp32" else 2


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _buckets(sizes: Sequence[int], limit: int) -> Iterator[int]:
    """Fill buckets in order, each up to the limit; a parameter above it has one of its own."""
    bucket = 0
    for size in sizes:
        if bucket and bucket + size > limit:
            yield bucket
            bucket = 0
        bucket += size
    if bucket:
        yield bucket


def _filled(sizes: Sequence[int], limit: int) -> Iterator[int]:
    """Fill buckets in order, each until it reaches the limit."""
    bucket = 0
    for size in sizes:
        bucket += size
        if bucket >= limit:
            yield bucket
            bucket = 0
    if bucket:
        yield bucket
