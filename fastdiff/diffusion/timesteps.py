"""Which noise levels the training draws: a pure function of (seed, position) and, for importance, of past losses.

A position has a share in [0, 1), and a density is a map from shares to levels that ascends in noise: what is spread
evenly over the shares is spread over the levels as the density says.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fastdiff.config.objective import ObjectiveConfig
from fastdiff.config.timesteps import Density, TimestepConfig
from fastdiff.diffusion import densities
from fastdiff.diffusion.ddpm import Ddpm
from fastdiff.diffusion.levels import Process
from fastdiff.parallel.world import World
from fastdiff.rng import Stream, uniform

Level = Callable[[Tensor], Tensor]
"""``[B]`` shares in [0, 1) ``-> [B]`` levels, ascending."""

_WHOLE = 2.0**48
"""What the counts of a table add up to, about: exact in fp64, and far finer than the shares."""


class Shares:
    """A number in [0, 1) for each position of the run: that which the noise-add kernel draws, or stratified.

    Stratified, the G positions of an optimizer step get one G-th of [0, 1) each. Which one is the rank of the multiples
    of the golden ratio, modulo 1: any run of them is spread evenly, and so is each rank's micro-batch.

    Args:
        seed: of the run.
        strata: G, samples of an optimizer step; None: not stratified.
        device: where the positions are.
    """

    def __init__(self, seed: int, strata: int | None, device: torch.device | str) -> None:
        self._seed = seed
        self._strata = None if strata is None else golden_ranks(strata).to(device)

    def __call__(self, position: Tensor) -> Tensor:
        """``[B]`` int64 positions ``-> [B]`` shares: fp32, or fp64 if stratified, where fp32 would blur the strata."""
        share = uniform(self._seed, Stream.TIMESTEP, position, 1)[:, 0]
        if self._strata is None:
            return share
        strata = len(self._strata)
        return (self._strata[position % strata] + share.double()) / strata


def golden_ranks(count: int) -> Tensor:
    """Ranks of the first ``count`` multiples of the golden ratio, modulo 1: ``[count]`` int64, each number once."""
    golden = (math.sqrt(5.0) - 1.0) / 2.0
    return (torch.arange(count, dtype=torch.float64) * golden % 1.0).argsort().argsort()


class Tabulated:
    """Rows of a table, each as often as its weight says.

    The weights are rounded to integers: their running sums are exact, so the same on every machine, and the last one is
    never reached.

    Args:
        weights: ``[R]`` fp64, 0 or above, not all 0; on the device.
    """

    def __init__(self, weights: Tensor) -> None:
        self._counts = (weights * (_WHOLE / weights.sum())).round().to(torch.int64)
        self._ends = self._counts.cumsum(0)

    def __call__(self, share: Tensor) -> Tensor:
        """``[B]`` shares ``-> [B]`` int64 rows, ascending."""
        place = (share.double() * self._ends[-1]).to(torch.int64)
        return torch.searchsorted(self._ends, place, right=True)

    def correction(self, row: Tensor) -> Tensor:
        """``[B]`` rows ``-> [B]`` fp32: how much more often each would be drawn if all were drawn equally often."""
        return (self._ends[-1] / (len(self._counts) * self._counts[row]).double()).float()


class Timesteps:
    """Draws noise levels.

    Args:
        shares: the share of each position.
        level: the native level of each share.
        in_kernel: the noise-add kernel draws the same levels itself (ddpm, evenly, not stratified).
    """

    def __init__(self, shares: Shares, level: Level, *, in_kernel: bool = False) -> None:
        self.in_kernel = in_kernel
        self._shares, self._level = shares, level

    def draw(self, position: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[B]`` int64 positions ``-> [B]`` native levels and the weights ``[B]`` fp32 of their losses (None: 1)."""
        return self._level(self._shares(position)), None

    def observe(self, row: Tensor, losses: Tensor, position: Tensor) -> None:
        """Take in the losses of one micro-batch, each ``[B]``."""

    def end_step(self, world: World) -> None:
        """Learn from the losses of an optimizer step; called by all ranks."""

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, the same on every rank; empty for a density that does not learn."""
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on with the state of a checkpoint; an empty one starts anew."""


class Importance(Timesteps):
    """Draws timesteps of large losses more often, and weights the losses so that their mean stays the same.

    The losses of an optimizer step count from the next one on, in the order of their positions, whichever rank and
    micro-batch they are from: so the levels depend on the seed and on the losses alone.

    Args:
        shares: the share of each position.
        timesteps: number of timesteps T.
        device: where the losses are.
    """

    def __init__(self, shares: Shares, timesteps: int, device: torch.device | str) -> None:
        self._history = LossHistory(timesteps, device)
        self._seen: list[Tensor] = []
        self._table = Tabulated(self._history.weights())
        super().__init__(shares, self._table)

    def draw(self, position: Tensor) -> tuple[Tensor, Tensor | None]:
        """Timesteps, and the weights 1 / (T p_t) of their losses."""
        timestep = self._table(self._shares(position))
        return timestep, self._table.correction(timestep)

    def observe(self, row: Tensor, losses: Tensor, position: Tensor) -> None:
        """Keep the losses, taken before the weights of ``draw``, until the end of the step."""
        # fp64 holds all three exactly: positions up to 2**53.
        self._seen.append(torch.stack([position.double(), row.double(), losses.double()], dim=1))

    def end_step(self, world: World) -> None:
        """Take in what was observed since the last call, on each rank of equally many samples."""
        seen = world.concatenate(torch.cat(self._seen))
        self._seen.clear()
        seen = seen[seen[:, 0].argsort()]
        self._history.take(seen[:, 1].to(torch.int64), seen[:, 2].float())
        self._table = Tabulated(self._history.weights())

    def state(self) -> dict[str, Tensor]:
        """See ``LossHistory.state``."""
        return self._history.state()

    def restore(self, state: dict[str, Tensor]) -> None:
        """See ``LossHistory.restore``."""
        self._history.restore(state)
        self._table = Tabulated(self._history.weights())


def build_timesteps(
    config: TimestepConfig,
    objective: ObjectiveConfig,
    process: Process,
    *,
    seed: int,
    batch_samples: int,
    device: torch.device | str,
) -> Timesteps:
    """The sampler that ``config``, which has been checked against ``objective``, asks for."""
    density = config.of(objective)
    shares = Shares(seed, batch_samples if config.stratified else None, device)
    if density == "log_normal":
        return Timesteps(shares, lambda share: process.draw(share).float())
    if not isinstance(process, Ddpm):
        time = _time(config, density)
        return Timesteps(shares, lambda share: process.draw(densities.shift(time(share), config.shift)).float())
    if density == "importance":
        return Importance(shares, len(process.table), device)
    if density in ("earlier", "later", "range"):
        return Timesteps(shares, Tabulated(biased_weights(config, len(process.table)).to(device)))
    time = _time(config, density)
    in_kernel = density == "uniform" and not config.stratified
    return Timesteps(shares, lambda share: process.draw(time(share)), in_kernel=in_kernel)


def biased_weights(config: TimestepConfig, timesteps: int) -> Tensor:
    """How often each timestep is drawn, ``[timesteps]`` fp64, up to a factor, as diffusers' SDXL script biases them."""
    biased = config.biased(timesteps)
    weights = torch.ones(timesteps, dtype=torch.float64)
    weights[biased.start : biased.stop] *= config.bias_multiplier
    return weights


def _time(config: TimestepConfig, density: Density) -> Level:
    """Shares ``-> t`` in [0, 1) of a density that ddpm and flow have."""
    if density == "logit_normal":
        mean, std = config.mean or 0.0, 1.0 if config.std is None else config.std
        return lambda share: densities.logit_normal(share, mean, std)
    if density == "mode":
        return lambda share: densities.mode(share, config.mode_scale)
    if density == "cosmap":
        return densities.cosmap
    return lambda share: share


HISTORY = 10
"""Losses that are kept of each timestep (ibid.)."""
UNIFORM_PROB = 0.001
"""Share of the draws that is spread evenly, so that no timestep is ever forgotten, as in the paper's code."""


class LossHistory:
    """The last losses of each timestep, on the device: nothing here waits for it.

    Args:
        timesteps: number of timesteps T.
        device: where the losses are.
    """

    def __init__(self, timesteps: int, device: torch.device | str) -> None:
        # One row more than there are timesteps: what is not kept goes there, so that every shape is static.
        self._losses = torch.zeros(timesteps + 1, HISTORY, device=device)
        self._taken = torch.zeros(timesteps + 1, dtype=torch.int64, device=device)

    def take(self, timestep: Tensor, losses: Tensor) -> None:
        """Take in losses, the oldest first; those that are not finite are passed over.

        Args:
            timestep: ``[N]`` int64.
            losses: ``[N]`` fp32.
        """
        nowhere = len(self._taken) - 1
        timestep, order = torch.where(losses.isfinite(), timestep, nowhere).sort(stable=True)
        # Losses of one timestep are neighbours now, still in their order: each learns how many came before and after.
        first = torch.searchsorted(timestep, timestep)
        end = torch.searchsorted(timestep, timestep, right=True)
        place = torch.arange(len(timestep), device=timestep.device)
        row = torch.where(end - place <= HISTORY, timestep, nowhere)
        column = (self._taken[timestep] + place - first) % HISTORY
        self._losses.view(-1).scatter_(0, row * HISTORY + column, losses[order])
        self._taken.scatter_add_(0, timestep, torch.ones_like(timestep))

    def weights(self) -> Tensor:
        """How often each timestep should be drawn, up to a factor: ``[T]`` fp64, equal until all histories are full."""
        root = self._losses[:-1].double().square().mean(dim=1).sqrt()
        # If no timestep has a loss, the equal shares are left.
        learned = (1.0 - UNIFORM_PROB) * root / root.sum().clamp(min=1e-300) + UNIFORM_PROB / len(root)
        return torch.where((self._taken[:-1] >= HISTORY).all(), learned, 1.0 / len(root))

    def state(self) -> dict[str, Tensor]:
        """``history [T, HISTORY]`` fp32, a ring in which ``count [T]`` int64, losses taken so far, tells the oldest."""
        return {"history": self._losses[:-1], "count": self._taken[:-1]}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on with ``state``; start anew without one, or with that of another number of timesteps."""
        for name, values in self.state().items():
            if name in state and state[name].shape == values.shape:
                values.copy_(state[name])
            else:
                values.zero_()
