"""The class token of a teacher, which is noised and predicted beside the latents (Wu et al. 2025, arXiv:2507.01467).

It meets the noise level of its sample with noise of its own, and its target and its weight by level are those of the
latents.
"""

import torch
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.conditions import TEACHER_TOKEN
from fastdiff.diffusion.levels import ALPHA, SIGMA, TARGET_NOISE, TARGET_X0, Levels
from fastdiff.rng import Stream, normal


class ClassToken:
    """Noise and loss of the class token of a teacher.

    The noise is drawn in ``noisy`` and again in ``loss``. All arithmetic is fp32.

    Args:
        weight: of its loss beside that of the latents.
        seed: key of its noise.
        dtype: dtype of the noisy token.
    """

    def __init__(self, weight: float, *, seed: int, dtype: torch.dtype) -> None:
        self._weight, self._seed, self._dtype = weight, seed, dtype

    def noisy(self, batch: Batch, levels: Levels) -> Tensor:
        """Return the tokens ``[B, D]`` of a batch at the noise levels of its samples."""
        return self._mixed(batch, levels, ALPHA, SIGMA).to(self._dtype)

    def loss(self, prediction: Tensor, batch: Batch, levels: Levels) -> Tensor:
        """Return the squared error of a prediction ``[B, D]``, mean over its elements, with its weights: ``[B]`` fp32.

        ValueError: the prediction has another shape.
        """
        target = self._mixed(batch, levels, TARGET_X0, TARGET_NOISE)
        if prediction.shape != target.shape:
            raise ValueError(
                f"the prediction of the class token has shape {tuple(prediction.shape)}, expected {tuple(target.shape)}"
                "; check --model.teacher_width against the data"
            )
        error = (prediction.float() - target).square().mean(dim=1)  # [B, D] -> [B]
        return self._weight * levels.weights[levels.row] * error

    def _mixed(self, batch: Batch, levels: Levels, of_clean: int, of_noise: int) -> Tensor:
        clean = batch.condition[TEACHER_TOKEN].float()
        noise = normal(self._seed, Stream.TEACHER_TOKEN, batch.position, clean.shape[1:])
        row = levels.table[levels.row]  # [B, 4]
        return row[:, of_clean, None] * clean + row[:, of_noise, None] * noise
