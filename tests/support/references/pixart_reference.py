"""Small PixArts, inputs for them, diffusers' network with the same weights, and a plain one in float64."""

import math
from typing import Any

import torch
from torch import Tensor

from fastdiff.config.networks.pixart import PixArtConfig
from fastdiff.models.pixart.network import PixArt

_SMALL: dict[str, Any] = {
    "depth": 2, "hidden": 48, "heads": 4, "size": 8, "caption_dim": 20, "caption_tokens": 9, "learn_sigma": True,
}  # fmt: skip
SMALL = {
    "alpha": PixArtConfig(**_SMALL, pe_interpolation=2.0, size_conditioning=True),
    "sigma": PixArtConfig(**_SMALL, pe_interpolation=0.5),
}
SIZES = ((8, 8), (6, 12))
"""The default one, and that of a bucket."""


def inputs(config: PixArtConfig, batch: int = 3, height: int = 8, width: int = 8) -> dict[str, Tensor]:
    """Arguments of a PixArt by name; its captions have one token, some and all."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    lengths = torch.tensor([1, config.caption_tokens // 2, config.caption_tokens])[:batch]
    mask = torch.arange(config.caption_tokens)[None] < lengths[:, None]
    found = {
        "noisy": normal(batch, config.channels, height, width),
        "time": torch.tensor([3, 997, 501])[:batch],
        "context": normal(batch, config.caption_tokens, config.caption_dim) * mask[..., None],
        "context_mask": mask,
    }
    if config.size_conditioning:
        sizes = [[640.0, 960.0, 3.0, 0.0, 512.0, 768.0], [512.0, 512.0, 0.0, 0.0, 512.0, 512.0]]
        found["time_ids"] = torch.tensor([*sizes, [333.0, 1111.0, 0.0, 8.0, 256.0, 832.0]][:batch])
    return found


def built(config: PixArtConfig, seed: int = 0, **options: Any) -> PixArt:
    """A PixArt whose every weight matters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = PixArt(config, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def diffusers_pixart(config: PixArtConfig) -> Any:
    """diffusers' network of the same configuration."""
    from diffusers import PixArtTransformer2DModel

    return PixArtTransformer2DModel(**config.to_diffusers())


def diffusers_forward(model: Any, arguments: dict[str, Tensor]) -> Tensor:
    """Its output for ``inputs``, sizes as diffusers' pipelines give them."""
    sizes: dict[str, Tensor | None] = {"resolution": None, "aspect_ratio": None}
    if "time_ids" in arguments:
        ids = arguments["time_ids"]
        sizes = {"resolution": ids[:, :2], "aspect_ratio": ids[:, 4:5] / ids[:, 5:]}
    out: Tensor = model(
        arguments["noisy"],
        encoder_hidden_states=arguments["context"],
        timestep=arguments["time"],
        encoder_attention_mask=arguments["context_mask"],
        added_cond_kwargs=sizes,
    ).sample
    return out


def plain_forward(config: PixArtConfig, weights: dict[str, Tensor], arguments: dict[str, Tensor]) -> Tensor:
    """The network in plain torch and float64 after arXiv:2310.00426, sections 2.3 and 2.4, one sample at a time."""
    w = {name: value.double() for name, value in weights.items()}

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def embedded(name: str, number: Tensor) -> Tensor:
        angles = number.double() * torch.tensor([10000.0 ** (-k / 128) for k in range(128)], dtype=torch.float64)
        inner = linear(f"adaln_single.emb.{name}.linear_1", torch.cat([angles.cos(), angles.sin()]))
        return linear(f"adaln_single.emb.{name}.linear_2", inner * inner.sigmoid())

    def normed(x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def gelu(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def attention(name: str, x: Tensor, context: Tensor) -> Tensor:
        query, key, value = linear(f"{name}.to_q", x), linear(f"{name}.to_k", context), linear(f"{name}.to_v", context)
        width = config.hidden // config.heads
        heads = [slice(n * width, (n + 1) * width) for n in range(config.heads)]
        mixed = [(query[:, h] @ key[:, h].T / math.sqrt(width)).softmax(1) @ value[:, h] for h in heads]
        return linear(f"{name}.to_out.0", torch.cat(mixed, 1))

    def sample(n: int) -> Tensor:
        noisy, patch = arguments["noisy"][n].double(), config.patch
        rows, columns = noisy.shape[1] // patch, noisy.shape[2] // patch
        cuts = [(row, column) for row in range(rows) for column in range(columns)]
        kernel = w["pos_embed.proj.weight"].flatten(1)
        tokens = []
        for row, column in cuts:
            cut = noisy[:, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
            place: list[float] = []
            for position, count in ((column, columns), (row, rows)):
                scaled = position * config.side / count / config.pe_interpolation
                angles = [scaled * 10000.0 ** (-k / (config.hidden // 4)) for k in range(config.hidden // 4)]
                place += [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
            positions = torch.tensor(place, dtype=torch.float64)
            tokens.append(kernel @ cut.flatten() + w["pos_embed.proj.bias"] + positions)
        x = torch.stack(tokens)
        embedding = embedded("timestep_embedder", arguments["time"][n])
        if config.size_conditioning:
            height, width, _, _, high, wide = arguments["time_ids"][n].double()
            sizes = [embedded("resolution_embedder", side) for side in (height, width)]
            embedding = embedding + torch.cat([*sizes, embedded("aspect_ratio_embedder", high / wide)])
        shared = linear("adaln_single.linear", embedding * embedding.sigmoid()).view(6, -1)
        words = arguments["context"][n][arguments["context_mask"][n]].double()
        words = linear("caption_projection.linear_2", gelu(linear("caption_projection.linear_1", words)))
        for number in range(config.depth):
            name = f"transformer_blocks.{number}"
            shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = shared + w[f"{name}.scale_shift_table"]
            y = normed(x) * (1 + scale) + shift
            x = x + gate * attention(f"{name}.attn1", y, y)
            x = x + attention(f"{name}.attn2", x, words)
            y = normed(x) * (1 + mlp_scale) + mlp_shift
            x = x + mlp_gate * linear(f"{name}.ff.net.2", gelu(linear(f"{name}.ff.net.0.proj", y)))
        shift, scale = w["scale_shift_table"] + embedding
        patches = linear("proj_out", normed(x) * (1 + scale) + shift)
        out = torch.empty(config.out_channels, *noisy.shape[1:], dtype=torch.float64)
        for (row, column), values in zip(cuts, patches, strict=True):
            pixels = values.view(patch, patch, -1).permute(2, 0, 1)
            out[:, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch] = pixels
        return out

    return torch.stack([sample(n) for n in range(len(arguments["noisy"]))])
