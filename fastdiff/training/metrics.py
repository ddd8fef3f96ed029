"""Metrics of a run: accumulated on the device, read when a callback is due."""

import re
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from fastdiff.diffusion.levels import Levels
from fastdiff.diffusion.snr_bins import BINS, SNR_EDGES
from fastdiff.json_lines import Record
from fastdiff.ledger.writer import Ledger
from fastdiff.parallel.compute_time import ComputeTime
from fastdiff.parallel.heartbeat import Heartbeat, Phase
from fastdiff.parallel.world import World

QUARTILES = 4
BY_LEVEL = (*(f"loss_q{n}" for n in range(QUARTILES)), *(f"loss_snr_{n:02d}" for n in range(BINS)))
"""Names of the losses by noise level: by quartile of the depth, and by bin of the log SNR (``diffusion.snr_bins``)."""


class Meters:
    """Losses and times since the last read.

    ``add`` does no host synchronisation; ``read`` does, once, so only a callback that is due calls it.

    Args:
        world: the ranks.
        heartbeat: heartbeat of this rank, driven by ``phase``; None outside of training.
        parts: names of the parts that the losses are sums of.
        ledger: account of this rank's time, which gets the waits for data and, at a read, the times of all ranks.
        sets: factors of the losses of several data sets, by their names.
    """

    def __init__(
        self,
        world: World,
        heartbeat: Heartbeat | None = None,
        parts: Sequence[str] = (),
        ledger: Ledger | None = None,
        sets: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._world, self._ledger = world, ledger
        self._own, self._power = ComputeTime(world.device), PowerMeter(world.device)
        suffixes = ("", *(f"_q{n}" for n in range(QUARTILES)))
        self._sets = tuple(sets.values())
        self.names = (
            *BY_LEVEL,
            *(part + suffix for part in parts for suffix in suffixes),
            *(f"loss_set_{name}" for name in sets),
        )
        """Names of the means other than ``loss``: ``BY_LEVEL``, every part as a whole and by quartile, and the data
        sets, whose means are without their factors."""
        self._heartbeat = heartbeat
        self._taken = 0
        self.sums = torch.zeros(2, 1 + len(self.names), dtype=torch.float64, device=world.device)
        """``[2, 1 + names]`` float64 of this rank's finite losses since the last read: their sums (row 0) and weights
        (row 1), over all samples (column 0: their number) and by name; part of a checkpoint."""
        self._edges = torch.tensor(SNR_EDGES, device=world.device)
        self._set_numbers = torch.arange(len(self._sets), device=world.device)
        self._groups = torch.tensor([*range(QUARTILES), *range(BINS)], device=world.device)
        self._reset_times()
        self.step: list[tuple[Tensor, Tensor]] = []
        """(position, loss), both ``[micro]``, of each micro-batch of the current step on this rank."""

    def add(
        self,
        losses: Tensor,
        position: Tensor,
        levels: Levels,
        importance: Tensor | None = None,
        parts: Sequence[Tensor] = (),
        data_set: Tensor | None = None,
    ) -> None:
        """Add the losses of one micro-batch: ``count`` and ``note``."""
        self.count(losses, levels, importance, parts, data_set)
        self.note(position, losses.detach())

    def count(
        self,
        losses: Tensor,
        levels: Levels,
        importance: Tensor | None = None,
        parts: Sequence[Tensor] = (),
        data_set: Tensor | None = None,
    ) -> None:
        """Add the losses of one micro-batch to the sums, by the device alone.

        Args:
            losses: ``[B]``, weighted by ``importance``.
            levels: their noise levels.
            importance: ``[B]`` weights of levels that are drawn unevenly, over which a group's mean is taken; None: 1.
            parts: ``[B]`` each, in the order of the names; their sum times ``importance`` is ``losses``.
            data_set: ``[B]`` int64, number of the data set of each sample; None: there are not several.
        """
        losses = losses.detach()
        finite = torch.isfinite(losses)
        weights = finite.double() if importance is None else finite * importance.double()
        member = self._members(levels).double()
        ends = 1 + len(BY_LEVEL)
        self.sums[:, :ends] += _sums(losses, finite, weights, member)
        for number, part in enumerate(parts):
            own = slice(ends + number * (1 + QUARTILES), ends + (number + 1) * (1 + QUARTILES))
            weighted = part if importance is None else part * importance
            self.sums[:, own] += _sums(weighted, finite, weights, member[:, :QUARTILES])
        if data_set is not None and self._sets:
            of_set = data_set.unsqueeze(1) == self._set_numbers
            self.sums[:, -len(self._sets) :] += _sums(losses, finite, weights, of_set.double())[:, 1:]

    def note(self, position: Tensor, losses: Tensor) -> None:
        """Keep the positions and losses of a micro-batch, both ``[B]``, until the next step."""
        self.step.append((position, losses))
        self._own.mark()

    def _members(self, levels: Levels) -> Tensor:
        """Return ``[B, len(BY_LEVEL)]`` bool: whether a sample belongs to a group."""
        quartile = (QUARTILES * levels.depth[levels.row]).long().clamp(max=QUARTILES - 1).unsqueeze(1)
        bin_ = torch.bucketize(levels.log_snr[levels.row], self._edges, right=True).unsqueeze(1)
        return torch.cat([quartile == self._groups[:QUARTILES], bin_ == self._groups[QUARTILES:]], dim=1)

    def start_step(self, taken: int) -> None:
        """Begin the optimizer step after ``taken`` steps."""
        self._taken = taken
        self.step.clear()
        self._steps += 1
        self._own.begin()

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Report the start of a phase to the heartbeat; the time in ``data`` counts as waiting for data."""
        if self._heartbeat is not None:
            self._heartbeat.beat(self._taken, name)
        if name != "data":
            yield
            return
        before = time.perf_counter()
        with nullcontext() if self._ledger is None else self._ledger.account("data wait"):
            yield
        self._data_wait += time.perf_counter() - before

    def read(self) -> Record:
        """Return ``loss`` (mean over all ranks' samples since the last read) and times; start anew.

        ``names`` are the other means, None without samples.
        """
        (total, *totals), (samples, *weights) = self._exchange()
        elapsed = time.perf_counter() - self._since
        steps = max(1, self._steps)
        record: Record = {
            "loss": total / samples if samples else float("nan"),
            "step_ms": 1e3 * elapsed / steps,
            "data_wait_ms": 1e3 * self._data_wait / steps,
        }
        groups = zip(self.names, totals, weights, strict=True)
        record |= {name: value / weight if weight else None for name, value, weight in groups}
        for name, factor in zip(self.names[len(self.names) - len(self._sets) :], self._sets, strict=True):
            record[name] = None if record[name] is None else record[name] / factor
        self.sums.zero_()
        self._reset_times()
        return record

    def _exchange(self) -> list[list[float]]:
        """Add up the sums of all ranks; the own time of each rank and the power travel with them, to the ledger."""
        own_s, watts = [0.0] * self._world.size, self._power.watts()
        own_s[self._world.rank] = self._own.read()
        told = self.sums.new_tensor([0.0 if watts is None else watts, watts is not None, *own_s])
        every = self._world.sum_(torch.cat([self.sums.flatten(), told])).tolist()
        columns = self.sums.shape[1]
        watts, measured, *own_s = every[2 * columns :]
        if self._ledger is not None:
            self._ledger.note_ranks(own_s, watts / measured if measured else None)
        return [every[:columns], every[columns : 2 * columns]]

    def restore(self, sums: Tensor) -> None:
        """Continue with the sums of a checkpoint; older formats lack the parts, or the noise levels and are ignored."""
        if sums.shape in (self.sums.shape, (2, 1 + len(BY_LEVEL))):
            self.sums[:, : sums.shape[1]].copy_(sums)

    def reset(self) -> None:
        """Discard everything accumulated, which belongs to undone steps."""
        self.sums.zero_()
        self.step.clear()
        self._reset_times()

    @contextmanager
    def off_the_clock(self) -> Iterator[None]:
        """Exclude the enclosed time (previews, checkpoints) from the step times."""
        before = time.perf_counter()
        yield
        self._since += time.perf_counter() - max(before, self._since)

    def restart_clock(self) -> None:
        """Begin the times anew: what was before belongs to no step."""
        self._reset_times()

    def _reset_times(self) -> None:
        self._since = time.perf_counter()
        self._data_wait = 0.0
        self._steps = 0


def _sums(losses: Tensor, finite: Tensor, weights: Tensor, member: Tensor) -> Tensor:
    """Return sums and weights ``[2, 1 + L]`` float64, over all samples (their number) and by group.

    Args:
        losses: ``[B]``, weighted.
        finite: ``[B]`` bool, whether a sample counts.
        weights: ``[B]`` float64, 0 for samples that do not count.
        member: ``[B, L]`` float64, 1 for the members of a group. Sums over such one-hot rows have a fixed shape and a
            fixed order, unlike scattered additions on a GPU.
    """
    values = torch.where(finite, losses, 0.0).double()
    whole = torch.stack([values.sum(), finite.sum().double()]).unsqueeze(1)
    return torch.cat([whole, (torch.stack([values, weights]).unsqueeze(2) * member).sum(1)], dim=1)  # [2, B, L] summed


def peak_gib(device: torch.device) -> float:
    """Return the largest memory use so far in GiB."""
    return peak_bytes(device) / 2**30


def peak_bytes(device: torch.device) -> int:
    """Return the largest memory use so far in bytes: allocated on a GPU, resident of this process on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Return the high-water mark of this process's resident memory.

    ``ru_maxrss`` is used only if the kernel does not report it: a process inherits it from its parent.
    """
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+)", status.read_text() if status.exists() else "")
    return 1024 * (int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


class PowerMeter:
    """Reading of the power of this rank's GPU by NVML, through torch; a CPU is not measured.

    It needs the package nvidia-ml-py (import name pynvml), which fastdiff does not install.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    def watts(self) -> float | None:
        """Return the power in watts, which the driver averages over a second at most; None: it cannot be read."""
        if self._device is None:
            return None
        try:
            return torch.cuda.power_draw(self._device) / 1e3
        except Exception:  # no package, no permission, or a GPU that does not tell: a class for each
            self._device = None
            return None
