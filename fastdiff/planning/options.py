"""Ways to run a training on given GPUs: which fit, how long they take, and why others fall out."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import torch

from fastdiff.config import deepspeed as deepspeed_config
from fastdiff.config.engine import choose, require_engine
from fastdiff.config.launch_options import Launch
from fastdiff.config.optimizers.registry import family_of, optimizer_family
from fastdiff.config.presets.reported import REPORTED
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.batch import micro_batches
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.errors import ConfigError
from fastdiff.models.cost.flops import run_flops
from fastdiff.models.cost.memory import Setup, setup_of
from fastdiff.models.kernel_choice import compiles
from fastdiff.planning.calibration import Basis
from fastdiff.planning.gpus import Gpus
from fastdiff.planning.kernels import of_traced
from fastdiff.planning.memory import RESERVED, Memory, memory
from fastdiff.planning.network import Network
from fastdiff.planning.rates import Interval
from fastdiff.planning.scaling.owners import WholeWeights
from fastdiff.planning.scaling.zero import Zero, width_of
from fastdiff.planning.step_time import StepTime, Work

NAMES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
"""The DeepSpeed configuration of each ZeRO stage."""
OF_STAGE = {stage: deepspeed_config.read(name) for stage, name in NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A choice of all that changes memory and time but not the losses beyond rounding, except smaller moments."""

    gpus: Gpus
    stage: int
    micro: int
    recompute: bool
    optimizer: str
    blocks: int
    """Of the network."""
    stored_blocks: int = 0
    """Those that keep their activations although the others are recomputed."""

    @property
    def recomputes(self) -> str:
        """Which blocks are recomputed, in words."""
        if not self.recompute:
            return "no"
        return f"{self.blocks - self.stored_blocks} of {self.blocks}" if self.stored_blocks else "yes"

    @property
    def bits(self) -> int:
        """Bits of the optimizer's state per element."""
        return optimizer_family(self.optimizer).bits


@dataclass(frozen=True, kw_only=True)
class Planned:
    """An option with what is predicted for it."""

    option: Option
    config: RunConfig
    memory: Memory
    time: StepTime | None
    """None: it does not fit."""
    basis: Basis

    @property
    def room(self) -> float:
        """Bytes that a rank can use."""
        return self.option.gpus.kind.memory_gib * 2**30 - RESERVED

    @property
    def fits(self) -> bool:
        """Whether they suffice."""
        return self.memory.peak <= self.room

    @cached_property
    def images_per_s(self) -> Interval:
        """Samples per second of all ranks."""
        assert self.time is not None
        return self.time.whole.under(self.config.batch.samples)

    def hours(self, samples: int) -> Interval:
        """Return the hours for this many samples."""
        return self.images_per_s.under(samples / 3600)

    def gpu_hours(self, samples: int) -> float:
        """Return the hours of all GPUs together for this many samples; middle."""
        return self.option.gpus.count * self.hours(samples).middle

    @property
    def mfu(self) -> float | None:
        """Share of the dense 16-bit rate that the network's products take; None: the table has no such rate."""
        kind = self.option.gpus.kind
        return kind.mfu(run_flops(self.config) * self.images_per_s.middle / self.option.gpus.count)


@dataclass(frozen=True, slots=True)
class Refused:
    """Options of some GPUs that fall out for one reason."""

    gpus: Gpus
    reason: str
    options: int
    lacks_memory: bool = False
    """Whether more memory would help."""


def options(
    config: RunConfig, launch: Launch, network: Network, gpus: Gpus, basis: Basis
) -> tuple[list[Planned], list[Refused]]:
    """Return the options of some GPUs that fit, the fastest first, and why others fall out.

    With recomputation, as many blocks as fit keep their activations. What the command line fixes is not varied: a
    DeepSpeed JSON, a micro-batch, recomputation, the number of those blocks, smaller moments. Nor are the moments of an
    adapter or a published recipe.
    """
    if reason := _unsuited(config, gpus):
        return [], [Refused(gpus, reason, 1)]
    fitting: list[Planned] = []
    lacking: list[Planned] = []
    without_engine: Counter[str] = Counter()
    fixed, share = config.batch.micro, config.batch.samples // gpus.count
    sizes = [fixed] if isinstance(fixed, int) else micro_batches(share, config.objective.samples_together)
    for stage, recompute, optimizer in _choices(config, launch, gpus):
        if reason := _no_engine(config, json_of(stage, launch), optimizer, gpus.count):
            without_engine[reason] += 1
            continue
        found = [
            _storing_most(config, launch, network, basis, Option(
                gpus=gpus, stage=stage, micro=micro, recompute=recompute, optimizer=optimizer, blocks=network.blocks
            )) for micro in sizes
        ]  # fmt: skip
        timed = [_timed(one, launch, network, basis) for one in found if one.fits]
        if timed:
            fitting.append(max(timed, key=_rounded_rate))  # the largest micro-batch of equals
        else:
            lacking.append(found[-1])
    fitting.sort(key=lambda one: -one.images_per_s.middle)
    refused = [Refused(gpus, reason, number) for reason, number in without_engine.items()]
    return fitting, [*refused, *([_no_memory(gpus, lacking)] if lacking else [])]


def _rounded_rate(planned: Planned) -> float:
    return float(f"{planned.images_per_s.middle:.4g}")


def distinct(fitting: Sequence[Planned]) -> list[Planned]:
    """Return the options, sorted by speed, without those that change more than a faster one of the same stage."""
    kept: list[Planned] = []
    for one in fitting:
        same = [other.option for other in kept if other.option.stage == one.option.stage]
        if not any(_changes(option) <= _changes(one.option) for option in same):
            kept.append(one)
    return kept


def _changes(option: Option) -> set[str]:
    return {name for name, has in (("recompute", option.recompute), ("smaller moments", option.bits < 32)) if has}


def _unsuited(config: RunConfig, gpus: Gpus) -> str | None:
    """Return why no option can run on these GPUs."""
    batch, rates, dtype = config.batch, gpus.kind.rates, _dtype(config.performance)
    if dtype not in rates:
        return f"has no {dtype}, has {', '.join(rates)}; change --performance.precision {config.performance.precision}"
    least = config.objective.samples_together
    micro = batch.micro if isinstance(batch.micro, int) else least
    if batch.samples % (gpus.count * micro):
        return f"--batch.samples {batch.samples} is not divisible by {gpus.count} ranks x {micro} samples"
    if micro % least:
        return f"--batch.micro {micro} is no multiple of {least}, the samples that the loss compares with each other"
    return None


def _no_engine(config: RunConfig, raw: deepspeed_config.DsConfig, optimizer: str, ranks: int) -> str | None:
    """Return why the engine that CUDA graphs or a flag ask for cannot train with this JSON and optimizer."""
    config = replace(config, optim=replace(config.optim, name=optimizer))
    resolved = deepspeed_config.resolve(raw, config, ranks)
    try:
        require_engine(config, resolved)
    except ConfigError as error:
        return str(error)
    return None


def _dtype(performance: PerformanceConfig) -> str:
    precision = performance.precision
    return "tf32" if precision == "fp32" and performance.allow_tf32 else precision


def _choices(config: RunConfig, launch: Launch, gpus: Gpus) -> Iterator[tuple[int, bool, str]]:
    """Yield ZeRO stage, recomputation and optimizer, the least change first."""
    if launch.deepspeed is not None:
        stages = [deepspeed_config.zero_stage(launch.deepspeed)]
    elif config.performance.cuda_graph or config.performance.engine == "flat":
        stages = [0]  # of the flat engine
    else:
        stages = [0, 1, 2, 3] if gpus.count > 1 else [0]
        if config.performance.precision == "fp16":  # DeepSpeed does not scale the loss at stage 0
            stages = [stage for stage in stages if stage] or [1]
    again = [True] if config.performance.recompute else [False, True]
    # The moments of an adapter are small, and other moments make another recipe.
    fixed = config.lora.rank > 0 or launch.preset in REPORTED
    smaller = None if fixed else family_of(config.optim).smaller
    optimizers = [config.optim.name, *([smaller] if smaller else [])]
    yield from product(stages, again, optimizers)


def json_of(stage: int, launch: Launch) -> deepspeed_config.DsConfig:
    """Return the DeepSpeed JSON of an option: that of the command line, or the repository's file of the stage."""
    return OF_STAGE[stage] if launch.deepspeed is None else launch.deepspeed


def _storing_most(config: RunConfig, launch: Launch, network: Network, basis: Basis, option: Option) -> Planned:
    """Predict the memory of an option with the most blocks that keep their activations, or with none if none fits."""

    def stored(blocks: int) -> Planned:
        return _planned(config, launch, network, basis, replace(option, stored_blocks=blocks))

    if not option.recompute:
        return stored(0)
    if config.performance.stored_blocks or launch.gives("--performance.stored_blocks"):
        return stored(config.performance.stored_blocks)
    # All of them are the option without recomputation, where that may be left out.
    most = range(option.blocks + config.performance.recompute) or range(1)
    return stored(max(0, bisect_right(most, 0, key=lambda blocks: not stored(blocks).fits) - 1))


def _planned(config: RunConfig, launch: Launch, network: Network, basis: Basis, option: Option) -> Planned:
    config = replace(
        config,
        batch=replace(config.batch, micro=option.micro),
        optim=replace(config.optim, name=option.optimizer),
        performance=replace(config.performance, recompute=option.recompute, stored_blocks=option.stored_blocks),
    )
    raw = json_of(option.stage, launch)
    setup = setup_for(config, raw, network, option.gpus.count)
    held = memory_of(config, setup, network, bucket=Zero.of(raw).reduce_bucket)
    return Planned(option=option, config=config, memory=held, time=None, basis=basis)


def memory_of(config: RunConfig, setup: Setup, network: Network, *, bucket: int, on_cpu: bool = False) -> Memory:
    """Predict the memory of a rank.

    Args:
        config: of the run, with its micro-batch.
        setup: of the run.
        network: of the run.
        bucket: elements of gradients that ZeRO reduces at once.
        on_cpu: whether the rank trains on a CPU.
    """
    output, validation = config.output, config.validation
    return memory(
        setup,
        network.traced(config.performance),
        accumulates=config.batch.accumulation(setup.ranks) > 1,
        bucket=bucket,
        on_cpu=on_cpu,
        validates=bool(validation.data) or validation.draws_prompts,
        draws=bool(output.sample_every) and not config.model.text_conditional,
    )


def setup_for(config: RunConfig, raw: deepspeed_config.DsConfig, network: Network, ranks: int) -> Setup:
    """Return what decides the memory of a rank."""
    resolved = deepspeed_config.resolve(raw, config, ranks)
    return setup_of(
        config,
        resolved,
        ranks,
        flat=choose(config.optim, config.performance, resolved) == "flat",
        trained=network.trained,
        in_matrices=network.in_matrices,
        frozen_bytes=network.frozen_bytes,
        buffer_bytes=network.buffer_bytes,
        blocks=network.blocks,
    )


def _timed(planned: Planned, launch: Launch, network: Network, basis: Basis) -> Planned:
    work = work_of(planned.config, json_of(planned.option.stage, launch), network, planned.option.gpus.count)
    return replace(planned, time=basis.step_time(work, planned.option.gpus))


def work_of(config: RunConfig, raw: deepspeed_config.DsConfig, network: Network, ranks: int) -> Work:
    """Return the work of a rank in a step; ConfigError: the JSON offloads to the host, whose time is not modelled."""
    zero = Zero.of(raw)
    if zero.offload:
        raise ConfigError("the DeepSpeed JSON offloads the optimizer, whose time on the host plan does not predict")
    performance = config.performance
    alone = performance.cuda_graph or performance.in_order  # no graph holds a message, and sums in order follow a pass
    zero = replace(zero, overlap=zero.overlap and not alone, in_order=performance.in_order)
    accumulation = config.batch.accumulation(ranks)
    several = ranks * accumulation > 1
    traced = network.traced(performance)
    fused = compiles(performance, torch.device("cuda")) and performance.device != "cpu"
    return Work(
        kernels=of_traced(traced, fused=fused),
        launches=traced.launches,
        dtype=_dtype(performance),
        micro=config.batch.per_rank(ranks),
        accumulation=accumulation,
        zero=zero,
        parameters=network.parameters,
        frozen=network.frozen_parameters,
        width=width_of(performance.precision),
        sums=width_of(performance.sums if several else performance.precision),
        state_bytes=family_of(config.optim).state_bytes(network.in_matrices / max(network.trained, 1)),
        recomputed=traced.recomputed,
        whole=_whole_weights(config, network),
        captured=performance.cuda_graph,
    )


def _whole_weights(config: RunConfig, network: Network) -> WholeWeights | None:
    if (step := family_of(config.optim).matrix_step) is None:
        return None
    dtype = step.dtype(config.optim)
    return WholeWeights(flops=network.update_flops, dtype=dtype, width=width_of(dtype))


def _no_memory(gpus: Gpus, lacking: Sequence[Planned]) -> Refused:
    least = min(lacking, key=lambda one: one.memory.peak)
    option = least.option
    return Refused(
        gpus,
        f"need more than the {least.room / 2**30:.1f} GiB of a rank, at least {least.memory.peak / 2**30:.1f} GiB "
        f"(ZeRO-{option.stage}, micro-batch {option.micro}, {option.optimizer}"
        f"{', recomputed' if option.recompute else ''})",
        len(lacking),
        lacks_memory=True,
    )
