"""A DiT with trained weights, and the equations of the paper in float64 without modules."""

import math
from typing import Any

import torch
from torch import Tensor

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.models.build import build_model
from fastdiff.models.dit.network import DiT


def trained(config: DiTConfig, seed: int = 0, **options: Any) -> DiT:
    """A network all of whose weights matter: the fresh one is zero at its output."""
    model = build_model(config, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    assert isinstance(model, DiT)
    return model


def reference_position(side: int, hidden: int) -> Tensor:
    table = torch.zeros(side * side, hidden, dtype=torch.float64)
    quarter = hidden // 4
    for row in range(side):
        for column in range(side):
            for k in range(quarter):
                frequency = 1.0 / 10000 ** (k / quarter)
                token = table[row * side + column]
                token[k], token[quarter + k] = math.sin(column * frequency), math.cos(column * frequency)
                token[2 * quarter + k] = math.sin(row * frequency)
                token[3 * quarter + k] = math.cos(row * frequency)
    return table


def reference_norm(x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(((x - mean) ** 2).mean(-1, keepdim=True) + 1e-6)


def reference_silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def reference_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def reference_forward(w: dict[str, Tensor], c: DiTConfig, noisy: Tensor, time: Tensor, label: Tensor) -> Tensor:
    """One sample after the other, one head after the other, from the paper's figure 3."""

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ w[name + ".weight"].T + w[name + ".bias"]

    def sample(image: Tensor, t: float, y: int) -> Tensor:
        p, side = c.patch, c.size // c.patch
        corners = [(i * p, j * p) for i in range(side) for j in range(side)]
        patches = [image[:, i : i + p, j : j + p].reshape(-1) for i, j in corners]
        weight = w["x_embedder.proj.weight"].reshape(c.hidden, -1)
        x = torch.stack(patches) @ weight.T + w["x_embedder.proj.bias"] + reference_position(side, c.hidden)
        angles = torch.tensor([t * 10000 ** (-k / 128) for k in range(128)], dtype=torch.float64)
        wave = torch.cat([torch.cos(angles), torch.sin(angles)])
        condition = linear("t_embedder.mlp.2", reference_silu(linear("t_embedder.mlp.0", wave)))
        condition = reference_silu(condition + w["y_embedder.embedding_table.weight"][y])
        for n in range(c.depth):
            m = linear(f"blocks.{n}.adaLN_modulation.1", condition).reshape(6, c.hidden)
            qkv = linear(f"blocks.{n}.attn.qkv", reference_norm(x) * (1 + m[1]) + m[0])
            query, key, value = (part.reshape(len(x), c.heads, -1) for part in qkv.split(c.hidden, dim=-1))
            heads = []
            for h in range(c.heads):
                scores = query[:, h] @ key[:, h].T / math.sqrt(c.hidden // c.heads)
                odds = torch.exp(scores - scores.max(dim=1, keepdim=True).values)
                heads.append(odds / odds.sum(dim=1, keepdim=True) @ value[:, h])
            x = x + m[2] * linear(f"blocks.{n}.attn.proj", torch.cat(heads, dim=1))
            inner = reference_gelu(linear(f"blocks.{n}.mlp.fc1", reference_norm(x) * (1 + m[4]) + m[3]))
            x = x + m[5] * linear(f"blocks.{n}.mlp.fc2", inner)
        m = linear("final_layer.adaLN_modulation.1", condition).reshape(2, c.hidden)
        out = linear("final_layer.linear", reference_norm(x) * (1 + m[1]) + m[0])
        channels = out.shape[1] // p**2
        image = torch.zeros(channels, c.size, c.size, dtype=torch.float64)
        for (i, j), pixels in zip(corners, out, strict=True):
            image[:, i : i + p, j : j + p] = pixels.reshape(p, p, channels).permute(2, 0, 1)
        return image

    return torch.stack([sample(noisy[i].double(), float(time[i]), int(label[i])) for i in range(len(noisy))])
