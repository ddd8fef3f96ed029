"""Statistics of a micro-batch that add up over samples: latents, noise levels, conditions and targets of the loss."""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fastdiff.batch import Batch, Condition
from fastdiff.conditions import CONDITIONS
from fastdiff.config.networks.routing import DRAWN
from fastdiff.diffusion.levels import Corruption
from fastdiff.diffusion.objective import Objective
from fastdiff.diffusion.snr_bins import BINS, SNR_EDGES

GROUPS = 8
"""Groups of consecutive channels whose latents are told apart; fewer channels make as many groups."""
_ELEMENTS = 2**20
"""Elements of the latents that are measured at a time."""
_LARGEST = 20.0
"""Bound of a log SNR: data without noise and noise without data have infinite ones."""

Columns = dict[str, Tensor]
"""Numbers of each sample, ``[B]`` float64, by name; their sums over samples give the statistics (``moments``)."""


@torch.no_grad()
def columns_of(batch: Batch, objective: Objective) -> Columns:
    """Return the numbers of each sample of a micro-batch, on its device and without waiting for it.

    The noise levels, the dropped conditions and the loss are those of the training step: all of them are functions of
    the position. DREAM's correction, which needs the network, is left out. Little memory is taken beside that of the
    step: a few samples are measured at a time.
    """
    size = max(1, _ELEMENTS // batch.latents[0].numel())
    parts = [_columns(part, objective) for part in _split(batch, size)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _split(batch: Batch, size: int) -> Iterator[Batch]:
    for first in range(0, len(batch.position), size):
        rows = slice(first, first + size)
        condition = {name: value[rows] for name, value in batch.condition.items()}
        mask, of_set = (None if each is None else each[rows] for each in (batch.mask, batch.data_set))
        yield Batch(batch.latents[rows], batch.position[rows], condition, mask, of_set)


def _columns(batch: Batch, objective: Objective) -> Columns:
    corruption = objective.corrupted(batch)
    found = {"count": torch.ones_like(batch.position)}
    found |= _of_latents(objective.clean(batch)) | _of_levels(corruption)
    condition = {name: value for name, value in corruption.condition.items() if name not in DRAWN}
    found |= _of_conditions(condition, objective.null) | _of_targets(batch, corruption, objective)
    return {name: value.double() for name, value in found.items()}


def _of_latents(clean: Tensor) -> Columns:
    """Return moments, squared differences of neighbours, and what a mirror image has with the other sign.

    Args:
        clean: ``[B, C, H, W]`` x0.
    """
    found: Columns = {}
    powers = clean.double()
    for power in range(1, 5):
        found[f"x{power}"] = (powers**power).mean(dim=(1, 2, 3))
    steps = [(value[1] - value[0]).square().mean(dim=(1, 2, 3)) for value in _neighbours(clean) if value[0].numel()]
    if steps:
        found["step"] = torch.stack(steps).mean(dim=0)  # [directions, B] -> [B]
    odd = _odd_in_width(clean)
    for number, group in enumerate(clean.tensor_split(min(GROUPS, clean.shape[1]), dim=1)):
        for power in (1, 2):
            found[f"x{power}.{number}"] = (group**power).mean(dim=(1, 2, 3))
            for name, function in odd.items():
                found[f"{name}{power}.{number}"] = (group**power * function).mean(dim=(1, 2, 3))
    return found


def _odd_in_width(clean: Tensor) -> dict[str, Tensor]:
    """Return functions ``[H, W]`` that change their sign under a mirror: slant and bow, Legendre polynomials."""
    height, width = (
        torch.linspace(-1, 1, size, device=clean.device) if size > 1 else torch.zeros(1, device=clean.device)
        for size in clean.shape[2:]
    )
    return {"slant": torch.outer(height, width), "bow": torch.outer(1.5 * height.square() - 0.5, width)}


def _neighbours(clean: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    return (clean[..., :-1], clean[..., 1:]), (clean[..., :-1, :], clean[..., 1:, :])


def _of_levels(corruption: Corruption) -> Columns:
    """Return moments of the time that the network gets, of the log SNR, and of the noisy latents."""
    log_snr, time = _log_snr(corruption), corruption.time.double()
    return {
        "time": time,
        "time2": time.square(),
        "level": log_snr,
        "level2": log_snr.square(),
        "time.level": time * log_snr,
        "noisy2": corruption.noisy.float().square().mean(dim=(1, 2, 3)),
    }


def _log_snr(corruption: Corruption) -> Tensor:
    levels = corruption.levels
    return levels.log_snr[levels.row].double().clamp(-_LARGEST, _LARGEST)


def _of_conditions(condition: Condition, null: Condition) -> Columns:
    """Return by condition: whether it is the null, its mean square, and the share of tokens that a mask leaves."""
    found: Columns = {}
    for name, value in condition.items():
        kind, flat = CONDITIONS[name], value.flatten(1) if value.dim() > 1 else value.unsqueeze(1)
        if name in null and kind.dtype != "bool":  # masks of other captions may equal that of the empty one
            found[f"{name}/null"] = (flat == null[name].to(value.dtype).flatten()).all(dim=1)
        if kind.dtype == "bool":
            found[f"{name}/share"] = flat.double().mean(dim=1)
        elif kind.dtype != "int64":
            found[f"{name}/square"] = flat.float().square().mean(dim=1)
    return found


def _of_targets(batch: Batch, corruption: Corruption, objective: Objective) -> Columns:
    """Return, by bin of the log SNR, the losses of two predictions that need no network: zero, and the noisy latents.

    Each has the weight of its level. The first is the size of the target, and the ratio of both, which is free of the
    weight, says what is predicted.
    """
    parts = objective.parts  # of the training step, which the losses below replace
    noisy = corruption.noisy.float()
    given = {"zero": torch.zeros_like(noisy), "noisy": noisy}
    if objective.config.learns_variance:
        given = {name: torch.cat([value, torch.zeros_like(value)], dim=1) for name, value in given.items()}
    edges = torch.tensor(SNR_EDGES, dtype=torch.float64, device=noisy.device)
    bins = torch.bucketize(_log_snr(corruption), edges, right=True)
    member = bins.unsqueeze(1) == torch.arange(BINS, device=noisy.device)  # [B, BINS]
    found = {f"in.{n:02d}": member[:, n] for n in range(BINS)}
    for name, prediction in given.items():
        losses = objective.losses(prediction, batch, corruption).double()
        found |= {f"{name}.{n:02d}": torch.where(member[:, n], losses, 0.0) for n in range(BINS)}
    objective.parts = parts
    return found


_FEWEST = 8.0
"""Samples of a bin of the log SNR below which it has no statistics."""


def moments(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the statistics of samples from the sums of their columns; those without enough samples are left out."""
    count = sums["count"]
    mean = {name: value / count for name, value in sums.items()}
    found = _latents(mean) | _levels(mean)
    for name, value in mean.items():
        if "/" in name:
            found[f"condition/{name}"] = value
    for n in range(BINS):
        if (here := sums[f"in.{n:02d}"]) >= _FEWEST and (zero := sums[f"zero.{n:02d}"]) > 0:
            found[f"target/size_snr_{n:02d}"] = zero / here
            found[f"target/kind_snr_{n:02d}"] = sums[f"noisy.{n:02d}"] / zero
    return found


def _latents(mean: Mapping[str, float]) -> dict[str, float]:
    """Return mean and spread of the latents, and what a change of scale or mean leaves as it is: their structure."""
    first, variance = mean["x1"], max(mean["x2"] - mean["x1"] ** 2, 0.0)
    found = {"latents/mean": first, "latents/std": math.sqrt(variance)}
    groups = [name.partition(".")[2] for name in mean if name.startswith("x1.")]
    if len(groups) > 1:
        for group in groups:
            found[f"latents/mean.{group}"] = mean[f"x1.{group}"]
            spread = max(mean[f"x2.{group}"] - mean[f"x1.{group}"] ** 2, 0.0)
            found[f"latents/std.{group}"] = math.sqrt(spread)
    if not variance:
        return found
    third = mean["x3"] - 3 * first * mean["x2"] + 2 * first**3
    fourth = mean["x4"] - 4 * first * mean["x3"] + 6 * first**2 * mean["x2"] - 3 * first**4
    found["latents/skewness"], found["latents/kurtosis"] = third / variance**1.5, fourth / variance**2
    if "step" in mean:
        found["latents/roughness"] = mean["step"] / variance
    for group in groups:
        for name in ("slant", "bow"):
            here, squares = mean[f"{name}1.{group}"], mean[f"{name}2.{group}"]
            found[f"mirror/{name}.{group}"] = here / math.sqrt(variance)
            found[f"mirror/{name}_of_squares.{group}"] = (squares - 2 * first * here) / variance
    return found


def _levels(mean: Mapping[str, float]) -> dict[str, float]:
    time, level = mean["time"], mean["level"]
    of_time, of_level = mean["time2"] - time**2, mean["level2"] - level**2
    found = {
        "time/mean": time,
        "time/std": math.sqrt(max(of_time, 0.0)),
        "levels/mean": level,
        "levels/std": math.sqrt(max(of_level, 0.0)),
        "noisy/square": mean["noisy2"],
    }
    if of_time > 0 and of_level > 0:
        found["time/correlation"] = (mean["time.level"] - time * level) / math.sqrt(of_time * of_level)
    return found
