"""Slices of the parameters that each ZeRO stage assigns to a rank."""

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from fastdiff.errors import ConfigError
from fastdiff.parallel.fragments import Flat, Fragment
from fastdiff.parallel.world import World


def overwrite(parameter: Any, name: str, rank: int, read: Callable[[Fragment], Tensor]) -> None:
    """Copy fp32 weights into the working copy of a parameter, rounded as a step rounds them."""
    if hasattr(parameter, "ds_tensor"):
        for own in _stage3_fragments([parameter], {id(parameter): name}, rank):
            parameter.ds_tensor[: own.numel].copy_(read(own))
        if parameter.ds_status is not ZeroParamStatus.AVAILABLE:
            return
    parameter.copy_(read(Fragment(name, 0, parameter.numel(), 0)).view(parameter.shape))


def flats_of(engine: Any, optimizer: torch.optim.Optimizer, names: dict[int, str], world: World) -> Iterator[Flat]:
    """Yield this rank's flat fp32 tensors, for each of DeepSpeed's optimizer wrappers.

    Args:
        engine: DeepSpeed's.
        optimizer: the one that DeepSpeed wraps.
        names: of the parameters, by ``id``.
        world: the ranks.

    Raises:
        ConfigError: DeepSpeed chose an unknown wrapper.
    """
    wrapper = engine.optimizer
    if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        for key, parameters in zip(wrapper.fp32_partitioned_groups_flat, wrapper.fp16_groups, strict=True):
            yield Flat(key, optimizer.state, tuple(_stage3_fragments(parameters, names, world.rank)), owned=True)
    elif isinstance(wrapper, DeepSpeedZeroOptimizer):
        for key, parameters in zip(wrapper.single_partition_of_fp32_groups, wrapper.bit16_groups, strict=True):
            yield Flat(key, optimizer.state, tuple(_stage12_fragments(parameters, names)), owned=True)
    elif isinstance(wrapper, FP16_UnfusedOptimizer):
        pairs = [
            (key, names[id(parameter)])
            for keys, parameters in zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True)
            for key, parameter in zip(keys, parameters, strict=True)
        ]
        yield from _whole_parameters(pairs, optimizer, world)
    elif wrapper is optimizer:
        pairs = [(p, names[id(p)]) for group in optimizer.param_groups for p in group["params"]]
        yield from _whole_parameters(pairs, optimizer, world)
    else:
        raise ConfigError(
            f"the DeepSpeed JSON leads to {type(wrapper).__name__}, which fastdiff does not know; "
            "use --deepspeed_config zero1, zero2 or zero3"
        )


def _stage3_fragments(parameters: Iterable[Any], names: dict[int, str], rank: int) -> Iterator[Fragment]:
    """Yield this rank's fragments: ZeRO-3 cuts every parameter into W equal, zero-padded parts and joins them."""
    parameters = list(parameters)
    sizes = [p.partition_numel() for p in parameters]
    for parameter, size, end in zip(parameters, sizes, accumulate(sizes), strict=True):
        start = rank * size
        numel = min(size, parameter.ds_numel - start)
        if numel > 0:
            yield Fragment(names[id(parameter)], start, numel, end - size)


def _stage12_fragments(parameters: Iterable[Any], names: dict[int, str]) -> Iterator[Fragment]:
    """Yield this rank's fragments: ZeRO-1 and 2 join all parameters and cut the whole into W parts, across borders."""
    for parameter in parameters:
        mapping = parameter._hp_mapping
        if mapping is not None:
            low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
            yield Fragment(names[id(parameter)], low.start, low.numel, high.start)


def _whole_parameters(
    pairs: list[tuple[Tensor, str]], optimizer: torch.optim.Optimizer, world: World
) -> Iterator[Flat]:
    """Yield the whole parameters of ZeRO-0, equal on all ranks; their ownership is spread evenly, largest first."""
    load = [0] * world.size
    owner = {}
    for key, name in sorted(pairs, key=lambda pair: (-pair[0].numel(), pair[1])):
        owner[name] = load.index(min(load))
        load[owner[name]] += key.numel()
    for key, name in pairs:
        yield Flat(key, optimizer.state, (Fragment(name, 0, key.numel(), 0),), owned=owner[name] == world.rank)
