"""Alignment of a network's features with those of a teacher (REPA; Yu et al. 2024, arXiv:2410.06940, equation 8)."""

import torch
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.conditions import FEATURES


class Alignment:
    """Its loss.

    Args:
        weight: beside the loss of the latents.
        samples: of the training that are aligned, those at its beginning; None: all.
    """

    def __init__(self, weight: float, samples: int | None) -> None:
        self._weight, self._samples = weight, samples

    def loss(self, projected: Tensor, batch: Batch) -> Tensor:
        """Return minus the cosine of features and projected ones, mean over the patches, with its weight.

        Args:
            projected: ``[B, T, K]``, of the patches in the order of their rows.
            batch: with the features of the teacher.

        Returns:
            ``[B]`` fp32; 0 for samples behind the aligned ones.

        Raises:
            ValueError: the features have another shape.
        """
        features = batch.condition[FEATURES].float().flatten(2).transpose(1, 2)  # [B, K, h, w] -> [B, T, K]
        if projected.shape != features.shape:
            raise ValueError(
                f"the projected features have shape {tuple(projected.shape)}, the teacher's {tuple(features.shape)}; "
                "check --model.aligned_width, --model.patch and `fastdiff encode --teacher-side`"
            )
        losses = -self._weight * torch.cosine_similarity(projected.float(), features, dim=2).mean(dim=1)
        if self._samples is None:
            return losses
        return torch.where(batch.position < self._samples, losses, 0.0)
