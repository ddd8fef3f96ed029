"""Alignment of a network's features with those of a teacher (REPA; Yu et al. 2024, arXiv:2410.06940, equation 8)."""

import torch
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.conditions import FEATURES, TEACHER_TOKEN


class Alignment:
    """Its loss.

    Args:
        weight: beside the loss of the latents.
        samples: of the training that are aligned, those at its beginning; None: all.
        token: whether the class token of the teacher is aligned, too, as in SR-DiT (Bhanded 2025, arXiv:2512.12386).
    """

    def __init__(self, weight: float, samples: int | None, *, token: bool) -> None:
        self._weight, self._samples, self._token = weight, samples, token

    def loss(self, projected: Tensor, batch: Batch) -> Tensor:
        """Return minus the cosine of features and projected ones, mean over the tokens, with its weight.

        Args:
            projected: ``[B, T, K]``, of the patches in the order of their rows, behind the class token where it is
                aligned.
            batch: with the features of the teacher, and its clean class token ``[B, K]``.

        Returns:
            ``[B]`` fp32; 0 for samples behind the aligned ones.

        Raises:
            ValueError: the features have another shape.
        """
        features = batch.condition[FEATURES].float().flatten(2).transpose(1, 2)  # [B, K, h, w] -> [B, T, K]
        if self._token:
            token = batch.condition[TEACHER_TOKEN].float()
            features = torch.cat([token.unsqueeze(1), features], dim=1)  # -> [B, 1 + T, K]
        if projected.shape != features.shape:
            raise ValueError(
                f"the projected features have shape {tuple(projected.shape)}, the teacher's {tuple(features.shape)}; "
                "check --model.aligned_width, --model.patch and `fastdiff encode --teacher-side`"
            )
        losses = -self._weight * torch.cosine_similarity(projected.float(), features, dim=2).mean(dim=1)
        if self._samples is None:
            return losses
        return torch.where(batch.position < self._samples, losses, 0.0)
