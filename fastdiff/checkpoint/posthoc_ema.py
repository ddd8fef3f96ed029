"""Post-hoc EMA: power-function averages of any std, reconstructed from the snapshots of a run."""

import hashlib
import json
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastdiff.checkpoint.manifest import committed, digest_of, step_of, verify
from fastdiff.checkpoint.power_function import exponent, fit, power_name
from fastdiff.checkpoint.reader import Checkpoint, snapshot_folder
from fastdiff.console import log
from fastdiff.errors import ConfigError
from fastdiff.parallel.fragments import Fragment
from fastdiff.progress import Progress

LARGEST_ERROR = 0.1
"""Largest accepted error of a fit, relative to the profile."""


@dataclass(frozen=True, slots=True)
class Term:
    """One saved average and its coefficient."""

    saved: Checkpoint
    kind: str
    coefficient: float


@dataclass(frozen=True, slots=True)
class Reconstruction:
    """A power-function average at the step of a checkpoint, as a combination of averages saved up to that step."""

    terms: tuple[Term, ...]
    error: float
    """Distance between the combined profiles and the wanted one, relative to the wanted one."""

    @property
    def digest(self) -> str:
        """Sha256 of the combined averages and all their weights."""
        made_from = [(digest_of(term.saved.manifest), term.kind) for term in self.terms]
        return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()

    def read(self, name: str) -> Tensor:
        """Return a parameter, fp32 on the CPU, summed in fp64; only this parameter is in memory.

        ConfigError: a weight overflows the fp16 of the snapshots.
        """
        shape = self.terms[0].saved.manifest["parameters"][name]
        whole = Fragment(name, 0, math.prod(shape), 0)
        total = torch.zeros(whole.numel, dtype=torch.float64)
        for term in self.terms:
            total.add_(term.saved.slice(term.kind, whole).double(), alpha=term.coefficient)
        if not total.isfinite().all():
            raise ConfigError(f"{name}: a weight above 65504 does not fit into the snapshots; use --ema, or --raw")
        return total.float().view(shape)


def reconstruct(saved: Checkpoint, std: float) -> Reconstruction:
    """Reconstruct the average of relative ``std`` at the step of a checkpoint or snapshot.

    It combines the power-function averages in this checkpoint and in all intact snapshots of earlier steps. Damaged
    snapshots are skipped with a warning. ConfigError: the std is invalid, no power-function average was saved, or the
    fit error is too large.
    """
    gamma, end = exponent(std), _applied(saved)
    sources = [(source, known) for source in (*_earlier_snapshots(saved), saved) for known in source.ema_stds]
    if not sources or not end:
        raise ConfigError(
            f"{saved.folder}: no power-function average to make std {std} from; train with --ema.power_stds "
            "0.05 0.10 and --ema.snapshot_every"
        )
    gammas = np.array([exponent(known) for _, known in sources])
    ends = np.array([_applied(source) for source, _ in sources], np.float64)
    coefficients, error = fit(gammas, ends, gamma, end)
    if error > LARGEST_ERROR:
        stds = ", ".join(map(str, sorted({known for _, known in sources})))
        raise ConfigError(
            f"an average of std {std} at step {step_of(saved.folder)} cannot be made from {len(sources)} of stds "
            f"{stds}: the fit misses {error:.0%} of it, at most {LARGEST_ERROR:.0%} is accepted; choose a std "
            "between them or nearer to one, or train with more snapshots (--ema.snapshot_every)"
        )
    terms = zip(sources, coefficients, strict=True)
    return Reconstruction(
        tuple(Term(source, f"ema/{power_name(known)}", float(value)) for (source, known), value in terms), error
    )


def _applied(saved: Checkpoint) -> int:
    return Progress(**saved.manifest["progress"]).applied


def _earlier_snapshots(saved: Checkpoint) -> list[Checkpoint]:
    found = []
    for folder in reversed(committed(snapshot_folder(saved.folder.parent.parent))):
        if step_of(folder) < step_of(saved.folder):
            damage = verify(folder)
            if damage:
                log.warning(f"skipping a damaged snapshot: {damage[0]}")
            else:
                found.append(Checkpoint(folder))
    return [snapshot for snapshot in found if _applied(snapshot)]
