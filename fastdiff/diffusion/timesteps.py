"""Draws of the noise levels: a pure function of (seed, position) and, for importance sampling, of past losses.

Every position has a share, a uniform number in [0, 1). A density maps shares to levels, ascending in noise, so that
stratified shares give stratified levels.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fastdiff.config.sections.objective import ObjectiveConfig
from fastdiff.config.sections.timesteps import Density, TimestepConfig
from fastdiff.diffusion import densities
from fastdiff.diffusion.ddpm import Ddpm
from fastdiff.diffusion.levels import Process
from fastdiff.parallel.world import World
from fastdiff.rng import Stream, uniform

Level = Callable[[Tensor], Tensor]
"""``[B]`` shares in [0, 1) ``-> [B]`` levels, ascending."""

_WHOLE = 2.0**48
"""Approximate sum of the counts of a table: exact in fp64, and far finer than the shares."""


class Shares:
    """A number in [0, 1) for each position of the run: the noise-add kernel's own, or a stratified one.

    With stratification, each of the G positions of an optimizer step gets one G-th of [0, 1): its index is the rank of
    the position's multiple of the golden ratio, modulo 1. Consecutive multiples are spread evenly, so each rank's
    micro-batch is, too.

    Args:
        seed: seed of the run.
        strata: G, samples of an optimizer step; None: no stratification.
        device: device of the positions.
    """

    def __init__(self, seed: int, strata: int | None, device: torch.device | str) -> None:
        self._seed = seed
        self._strata = None if strata is None else golden_ranks(strata).to(device)

    def __call__(self, position: Tensor) -> Tensor:
        """Return the shares ``[B]`` of ``[B]`` int64 positions: fp32, stratified fp64 (fp32 would blur the strata)."""
        share = uniform(self._seed, Stream.TIMESTEP, position, 1)[:, 0]
        if self._strata is None:
            return share
        strata = len(self._strata)
        return (self._strata[position % strata] + share.double()) / strata


def golden_ranks(count: int) -> Tensor:
    """Return the ranks of the first ``count`` multiples of the golden ratio, modulo 1: ``[count]`` int64."""
    golden = (math.sqrt(5.0) - 1.0) / 2.0
    return (torch.arange(count, dtype=torch.float64) * golden % 1.0).argsort().argsort()


class Tabulated:
    """Rows of a table, drawn in proportion to their weights.

    The weights are rounded to integers: their running sums are exact, therefore equal on every machine, and no share
    reaches the last one.

    Args:
        weights: ``[R]`` fp64, 0 or above, not all 0; on the device.
    """

    def __init__(self, weights: Tensor) -> None:
        self._counts = (weights * (_WHOLE / weights.sum())).round().to(torch.int64)
        self._ends = self._counts.cumsum(0)

    def __call__(self, share: Tensor) -> Tensor:
        """Map ``[B]`` shares ``-> [B]`` int64 rows, ascending."""
        place = (share.double() * self._ends[-1]).to(torch.int64)
        return torch.searchsorted(self._ends, place, right=True)

    def correction(self, row: Tensor) -> Tensor:
        """Return the importance weights ``[B]`` fp32 of ``[B]`` rows: uniform over actual probability."""
        return (self._ends[-1] / (len(self._counts) * self._counts[row]).double()).float()


class Timesteps:
    """Sampler of noise levels.

    Args:
        shares: the share of each position.
        level: the native level of each share.
        in_kernel: whether the noise-add kernel draws the same levels itself (ddpm, uniform, not stratified).
    """

    def __init__(self, shares: Shares, level: Level, *, in_kernel: bool = False) -> None:
        self.in_kernel = in_kernel
        self._shares, self._level = shares, level

    def draw(self, position: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return ``[B]`` native levels for ``[B]`` int64 positions, and the loss weights ``[B]`` fp32 (None: 1)."""
        return self._level(self._shares(position)), None

    def observe(self, row: Tensor, losses: Tensor, position: Tensor) -> None:
        """Record the losses of one micro-batch, each argument ``[B]``."""

    def end_step(self, world: World) -> None:
        """Update from the losses of an optimizer step; called by all ranks."""

    def state(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint, equal on every rank; empty for a density that does not learn."""
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore the state of a checkpoint; an empty one resets."""


class Importance(Timesteps):
    """Loss-aware timestep sampling (IDDPM, section 3.3): large losses are drawn more often and weighted less.

    The losses of an optimizer step take effect from the next step on, in the order of their positions, independent of
    rank and micro-batch. So the levels depend only on the seed and on the losses.

    Args:
        shares: the share of each position.
        timesteps: number of timesteps T.
        device: device of the losses.
    """

    def __init__(self, shares: Shares, timesteps: int, device: torch.device | str) -> None:
        self._history = LossHistory(timesteps, device)
        self._seen: list[Tensor] = []
        self._table = Tabulated(self._history.weights())
        super().__init__(shares, self._table)

    def draw(self, position: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return timesteps and the loss weights 1 / (T p_t)."""
        timestep = self._table(self._shares(position))
        return timestep, self._table.correction(timestep)

    def observe(self, row: Tensor, losses: Tensor, position: Tensor) -> None:
        """Keep the losses, without the weights of ``draw``, until the end of the step."""
        # fp64 holds all three exactly: positions up to 2**53.
        self._seen.append(torch.stack([position.double(), row.double(), losses.double()], dim=1))

    def end_step(self, world: World) -> None:
        """Add the losses observed since the last call; every rank has equally many."""
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
    """Return the sampler for ``config``, which has been checked against ``objective`` and has its shift as a number."""
    density = config.of(objective)
    shares = Shares(seed, batch_samples if config.stratified else None, device)
    if density == "log_normal":
        return Timesteps(shares, lambda share: process.draw(share).float())
    if not isinstance(process, Ddpm):
        time, shift = _time(config, density), config.shift
        assert not isinstance(shift, str)
        return Timesteps(shares, lambda share: process.draw(densities.shift(time(share), shift)).float())
    if density == "importance":
        return Importance(shares, len(process.table), device)
    if density in ("earlier", "later", "range"):
        return Timesteps(shares, Tabulated(biased_weights(config, len(process.table)).to(device)))
    time = _time(config, density)
    in_kernel = density == "uniform" and not config.stratified
    return Timesteps(shares, lambda share: process.draw(time(share)), in_kernel=in_kernel)


def biased_weights(config: TimestepConfig, timesteps: int) -> Tensor:
    """Return unnormalised probabilities of the timesteps, ``[timesteps]`` fp64, biased as in diffusers' SDXL script."""
    biased = config.biased(timesteps)
    weights = torch.ones(timesteps, dtype=torch.float64)
    weights[biased.start : biased.stop] *= config.bias_multiplier
    return weights


def _time(config: TimestepConfig, density: Density) -> Level:
    """Return the map from shares to t in [0, 1) for a density of ddpm or flow."""
    if density == "logit_normal":
        mean, std = config.mean or 0.0, 1.0 if config.std is None else config.std
        edge, kept = config.truncation, config.kept()
        if edge:
            return lambda share: densities.truncated_logit_normal(share, mean, std, edge, kept)
        return lambda share: densities.logit_normal(share, mean, std)
    if density == "mode":
        return lambda share: densities.mode(share, config.mode_scale)
    if density == "cosmap":
        return densities.cosmap
    return lambda share: share


HISTORY = 10
"""Losses kept per timestep (IDDPM, section 3.3)."""
UNIFORM_PROB = 0.001
"""Fraction of uniform draws, so that every timestep is updated, as in the code of IDDPM."""


class LossHistory:
    """The last losses of each timestep, on the device; no method synchronises with it."""

    def __init__(self, timesteps: int, device: torch.device | str) -> None:
        # The additional last row takes losses that are not kept, so that every shape is static.
        self._losses = torch.zeros(timesteps + 1, HISTORY, device=device)
        self._taken = torch.zeros(timesteps + 1, dtype=torch.int64, device=device)

    def take(self, timestep: Tensor, losses: Tensor) -> None:
        """Add losses, the oldest first; losses that are not finite are ignored.

        Args:
            timestep: ``[N]`` int64.
            losses: ``[N]`` fp32.
        """
        nowhere = len(self._taken) - 1
        timestep, order = torch.where(losses.isfinite(), timestep, nowhere).sort(stable=True)
        # Losses of one timestep are adjacent now, in their order: count those before and after each.
        first = torch.searchsorted(timestep, timestep)
        end = torch.searchsorted(timestep, timestep, right=True)
        place = torch.arange(len(timestep), device=timestep.device)
        row = torch.where(end - place <= HISTORY, timestep, nowhere)
        column = (self._taken[timestep] + place - first) % HISTORY
        self._losses.view(-1).scatter_(0, row * HISTORY + column, losses[order])
        self._taken.scatter_add_(0, timestep, torch.ones_like(timestep))

    def weights(self) -> Tensor:
        """Return unnormalised probabilities ``[T]`` fp64, equal until all histories are full."""
        root = self._losses[:-1].double().square().mean(dim=1).sqrt()
        # If all losses are 0, only the uniform part remains.
        learned = (1.0 - UNIFORM_PROB) * root / root.sum().clamp(min=1e-300) + UNIFORM_PROB / len(root)
        return torch.where((self._taken[:-1] >= HISTORY).all(), learned, 1.0 / len(root))

    def state(self) -> dict[str, Tensor]:
        """Return ``history [T, HISTORY]`` fp32, a ring buffer, and ``count [T]`` int64, losses added so far."""
        return {"history": self._losses[:-1], "count": self._taken[:-1]}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore ``state``; reset if it is empty or has another number of timesteps."""
        for name, values in self.state().items():
            if name in state and state[name].shape == values.shape:
                values.copy_(state[name])
            else:
                values.zero_()
