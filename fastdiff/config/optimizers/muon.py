"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): orthogonalised momentum, and AdamW beside it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from fastdiff.config.optimizers.adamw import ADAMW8BIT, BLOCK
from fastdiff.config.optimizers.family import MatrixStep, OptimizerFamily, StateTensor
from fastdiff.config.sections.optim import OptimConfig
from fastdiff.errors import require

_LEAST_EPS = 2.0**-126
ITERATIONS = 5
"""Newton-Schulz iterations of a step (Jordan et al. 2024)."""
SCALES: Mapping[str, Callable[[int, int], float]] = {
    "keller": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "dion": lambda rows, columns: math.sqrt(rows / columns),
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
}
"""Factor of the update of a matrix, by ``--optim.scale`` and its rows and columns.

keller: github.com/KellerJordan/Muon, and ``adjust_lr_fn="original"`` of ``torch.optim.Muon``; match_rms_adamw: Liu et
al. 2025 (arXiv:2502.16982, section 2.2), and torch; dion: Yang, Simon and Bernstein 2023 (arXiv:2310.17813), and
"spectral_norm" of github.com/microsoft/dion; spectral: of github.com/NVIDIA-NeMo/Emerging-Optimizers, 5 times
match_rms_adamw.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonConfig(OptimConfig):
    """Muon for the matrices that the network declares, and AdamW for all other parameters."""

    name: Literal["muon", "muon-bf16", "muon8bit"] = "muon"
    """muon: fp32 momentum, 4 bytes of state per element of a matrix, and the 8 bytes of AdamW for each other parameter;
    muon-bf16: 2 and 8 bytes; muon8bit: 1 byte, and the 2 of adamw8bit."""
    lr: float = 0.02
    """Learning rate of the matrices after the warm-up."""
    momentum: float = 0.95
    """Decay rate of the momentum."""
    nesterov: bool = True
    """Mix the gradient into the momentum once more before the orthogonalisation."""
    scale: Literal["keller", "match_rms_adamw", "dion", "spectral"] = "keller"
    """Factor of the update of r rows and c columns; keller: sqrt(max(1, r/c)); match_rms_adamw: 0.2 sqrt(max(r, c)),
    whose updates are as large as AdamW's, so that its rates fit; dion: sqrt(r/c); spectral: sqrt(max(r, c))."""
    iterations_dtype: Literal["bf16", "fp32"] = "bf16"
    """Dtype of the orthogonalisation; bf16 has fp32 sums, and errors of 1 to 4 %."""
    adamw_lr: float = 3e-4
    """Learning rate of AdamW after the warm-up, for the parameters that are no matrices; it follows the schedule."""
    adamw_betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's moments."""
    adamw_eps: float = 1e-8
    """Epsilon of AdamW."""

    def _check_own(self) -> None:
        require(0 <= self.momentum < 1, f"--optim.momentum {self.momentum}: from 0 to below 1")
        require(0 < self.adamw_lr < math.inf, f"--optim.adamw_lr {self.adamw_lr}: above 0")
        require(
            self.adamw_lr * self.weight_decay < 1,
            f"--optim.weight_decay {self.weight_decay} with --optim.adamw_lr {self.adamw_lr}: their product is below 1",
        )
        require(
            all(0 <= b < 1 for b in self.adamw_betas), f"--optim.adamw_betas {self.adamw_betas}: each from 0 to below 1"
        )
        require(
            _LEAST_EPS <= self.adamw_eps < math.inf,
            f"--optim.adamw_eps {self.adamw_eps}: at least {_LEAST_EPS:.2g}, the smallest number of fp32",
        )


def newton_schulz_flops(rows: int, columns: int) -> int:
    """Return the floating-point operations on a matrix; of the wide one X they are X Xᵀ, its square, and that times X.

    ``training.optimizer.orthogonalise`` makes no use of the symmetry of the first two.
    """
    short, long = sorted((rows, columns))
    return ITERATIONS * 2 * (2 * short**2 * long + short**3)


_OF_OTHERS = (StateTensor(name="exp_avg", of="others"), StateTensor(name="exp_avg_sq", of="others"))
MUON = OptimizerFamily(
    name="muon",
    config=MuonConfig,
    optimizer="fastdiff.training.optimizer.muon:Muon",
    state=(StateTensor(name="momentum", of="matrices"), *_OF_OTHERS),
    counts="int",
    whole_matrices=True,
    ordered_arguments={},
    matrix_step=MatrixStep(flops=newton_schulz_flops, dtype=lambda config: config.iterations_dtype),
    library="fastdiff",
    smaller="muon-bf16",
    aliases=("torch.optim.muon", "muonwithauxadam", "singledevicemuonwithauxadam"),
)
MUON_BF16 = replace(
    MUON, name="muon-bf16", state=(StateTensor(name="momentum", of="matrices", dtype="bfloat16"), *_OF_OTHERS),
    smaller="muon8bit", aliases=(),
)  # fmt: skip
MUON8BIT = replace(
    MUON,
    name="muon8bit",
    optimizer="fastdiff.training.optimizer.muon8bit:Muon8bit",
    state=(
        StateTensor(name="momentum_codes", of="matrices", dtype="int8"),
        StateTensor(name="momentum_scales", of="matrices", unit="block", block=BLOCK),
        *(replace(tensor, of="others") for tensor in ADAMW8BIT.state),
    ),
    smaller=None,
    aliases=(),
)
