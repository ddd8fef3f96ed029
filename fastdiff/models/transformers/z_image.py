"""Z-Image: one stream of picture and caption tokens, each padded to a multiple of 32 with a learned token.

The learned padding takes part in attention. What a caption has beyond it, up to the longest of the batch, is masked out
at the end of the stream. diffusers' class takes lists and asks for lengths on the host; the same layers are called here
on whole batches, with lengths on the device and always with a mask, so that one graph serves every batch of a shape.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.config.networks.z_image import MULTIPLE, PATCH, ZImageConfig
from fastdiff.errors import require
from fastdiff.models.adapter_files.forms import ADAPTER_FORMATS
from fastdiff.models.blockwise import run_block
from fastdiff.models.family import ModelFamily
from fastdiff.models.fused import ONE, Declared, Fused
from fastdiff.models.pipeline_settings import PipelineSettings, linear_mu
from fastdiff.models.transformers.adapter import Cost, DiffusersTransformer

_LAYER = f"{PATCH}-1"
"""Name of the embedder and of the last layer for these patches of pictures."""


class ZImage(DiffusersTransformer[ZImageConfig]):
    """``ZImageTransformer2DModel`` on batches."""

    def forward(self, noisy: Tensor, time: Tensor, context: Tensor, context_mask: Tensor) -> Tensor:
        """Evaluate the network.

        Args:
            noisy: ``[B, C, H, W]``, any floating dtype; cast to the dtype of the weights.
            time: ``[B]`` fp32, from 0 (noise) to 1 (the data). It stays fp32: times a thousand, it is the phase of a
                sine.
            context: ``[B, L, cap_feat_dim]`` embeddings of the tokens of the captions.
            context_mask: ``[B, L]`` bool, the tokens that belong to the caption, first in their rows.

        Returns:
            ``[B, C, H, W]`` velocity from noise to data, in the dtype of the weights.

        Raises:
            ConfigError: the latents or the captions have more positions than the rotary table.
        """
        self._check(noisy, context)
        dtype = self.cap_embedder[1].weight.dtype
        context = F.pad(context.to(dtype), (0, 0, 0, -context.shape[1] % MULTIPLE))
        with self.attending(noisy, context.shape[1]):
            return self._evaluate(noisy.to(dtype), time, context, context_mask.sum(1))

    def _evaluate(self, noisy: Tensor, time: Tensor, context: Tensor, words: Tensor) -> Tensor:
        height, width = (size // PATCH for size in noisy.shape[2:])
        padded = torch.ceil(words / MULTIPLE).long() * MULTIPLE
        adaln = self.t_embedder(time.float() * self.config.t_scale).type_as(noisy)
        picture, turns = self._picture(noisy), self._turns_of_picture(padded, height, width)
        everywhere = torch.ones(picture.shape[:2], dtype=torch.bool, device=noisy.device)
        for block in self.noise_refiner:
            picture = run_block(block, picture, everywhere, turns, adaln, recompute=self.recompute)
        position = torch.arange(context.shape[1], device=noisy.device)
        caption = self.cap_embedder(context).where((position < words[:, None])[..., None], self.cap_pad_token)
        valid, turns_of_caption = position < padded[:, None], self._turns_of_caption(caption)
        for block in self.context_refiner:
            caption = run_block(block, caption, valid, turns_of_caption, recompute=self.recompute)
        tokens, valid = torch.cat([picture, caption], 1), torch.cat([everywhere, valid], 1)
        turns = torch.cat([turns, turns_of_caption], 1)
        for block in self.layers:
            tokens = run_block(block, tokens, valid, turns, adaln, recompute=self.recompute)
        pixels = self.all_final_layer[_LAYER](tokens, c=adaln)[:, : height * width]
        maps: Tensor = pixels.view(len(noisy), height, width, PATCH, PATCH, -1)
        return maps.permute(0, 5, 1, 3, 2, 4).reshape(noisy.shape)  # [B, h, w, p, p, C] -> [B, C, H, W]

    def _picture(self, noisy: Tensor) -> Tensor:
        """Return the tokens of the patches, in the order row, column, channel, and their padding."""
        batch, channels, height, width = noisy.shape
        patches = noisy.reshape(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
        tokens = self.all_x_embedder[_LAYER](patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2))
        padding = self.x_pad_token.expand(len(tokens), -tokens.shape[1] % MULTIPLE, -1)
        return torch.cat([tokens, padding], 1)

    def _turns_of_picture(self, padded: Tensor, height: int, width: int) -> Tensor:
        """Return the rotary factors of its tokens: behind the caption in place of the text, row, column; padding 0."""
        grid = torch.cartesian_prod(*(torch.arange(size, device=padded.device) for size in (height, width)))
        ids = torch.cat([(padded + 1)[:, None, None].expand(-1, len(grid), 1), grid.expand(len(padded), -1, -1)], 2)
        return self._turns(F.pad(ids, (0, 0, 0, -len(grid) % MULTIPLE)))

    def _turns_of_caption(self, caption: Tensor) -> Tensor:
        """Return the rotary factors of its tokens ``[B, L, D]``, counted from 1; those of padding go on."""
        position = torch.arange(1, caption.shape[1] + 1, device=caption.device)
        return self._turns(F.pad(position[:, None], (0, 2)).expand(len(caption), -1, -1))

    def _turns(self, ids: Tensor) -> Tensor:
        """``[B, T, 3] -> [B, T, head_dim / 2]`` complex64."""
        turns: Tensor = self.network.rope_embedder(ids.flatten(0, 1))
        return turns.view(*ids.shape[:2], -1)

    def _check(self, noisy: Tensor, context: Tensor) -> None:
        of_text, *of_picture = self.config.axes_lens
        longest = math.ceil(context.shape[1] / MULTIPLE) * MULTIPLE + 2
        sides = [size // PATCH for size in noisy.shape[2:]]
        require(
            longest <= of_text and all(side <= most for side, most in zip(sides, of_picture, strict=True)),
            f"captions of {context.shape[1]} tokens and latents of {' x '.join(map(str, noisy.shape[2:]))}: the rotary "
            f"tables of this Z-Image have {' x '.join(map(str, self.config.axes_lens))} positions for text, rows and "
            "columns; encode smaller pictures, or captions of at most "
            f"{(of_text - 2) // MULTIPLE * MULTIPLE} tokens by --max-tokens (in training --pretrained.max_tokens)",
        )


_COST = Cost(ZImage, (f"all_x_embedder.{_LAYER}", "t_embedder.mlp.0"))

_MATRICES: Declared = {
    "*refiner.*.adaLN_modulation.0.weight": Fused((1, 1, 1, 1)),
    "*refiner.*.weight": ONE,
    "layers.*.adaLN_modulation.0.weight": Fused((1, 1, 1, 1)),
    "layers.*.weight": ONE,
    "t_embedder.mlp.0.weight": None,
    "t_embedder.mlp.2.weight": ONE,
    "cap_embedder.1.weight": None,
    "all_x_embedder.*": None,
    "all_final_layer.*": None,
    "*_pad_token": None,
}


Z_IMAGE = ModelFamily(
    config=ZImageConfig,
    build=lambda config, /, *, recompute, attention, seed: ZImage(config, recompute=recompute, attention=attention),
    multiply_adds=_COST.total,
    input_multiply_adds=_COST.of_inputs,
    draws_on_meta=True,
    subject=lambda config: "A Z-Image text-to-image transformer",
    license=lambda config: "Apache-2.0",
    library="diffusers",
    script_format="diffusers",
    formats={"diffusers": "fastdiff.export.pipeline:DIFFUSERS", **ADAPTER_FORMATS},
    drawing=lambda config: PipelineSettings(steps=50, guidance=6.0, mu=linear_mu, even_sigmas=True),  # 1 + its 5
    sampling_batch=4,
    matrices=lambda config: _MATRICES,
)
