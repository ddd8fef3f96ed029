"""Small ADM UNets of each kind, their inputs, and the results of the reference."""

from typing import Any

import torch
from torch import Tensor

from fastdiff.config.networks.adm import AdmConfig
from fastdiff.models.adm.network import AdmUNet
from tests.support.references.adm_reference import Drop, Reference
from tests.support.references.unet_reference import difference

_SMALL: dict[str, Any] = {"size": 8, "width": 16, "norm_num_groups": 4, "attention_resolutions": (4,)}
SMALL = {
    # Strided and doubling convolutions, two heads, classes.
    "iddpm": AdmConfig(**_SMALL, channel_mult=(1, 2), res_blocks=2, heads=2, classes=5, learn_sigma=True),
    # The embedding is added, one head, no classes, and attention at the finest level as well.
    "lsun": AdmConfig(
        **{**_SMALL, "attention_resolutions": (8, 4)}, channel_mult=(1, 1, 2), res_blocks=1, heads=1,
        scale_shift_norm=False,
    ),
    # Sizes change within residual blocks, heads of 8 channels, all queries first, a level narrower than the width.
    "adm": AdmConfig(
        **_SMALL, channel_mult=(0.5, 1, 2), res_blocks=1, head_channels=8, qkv_order="qkv_major", classes=3,
        resblock_updown=True, learn_sigma=True,
    ),
    "adm added": AdmConfig(
        **_SMALL, channel_mult=(1, 2), res_blocks=1, heads=4, resblock_updown=True, scale_shift_norm=False
    ),
    "upsampler": AdmConfig(**_SMALL, channel_mult=(1, 2), res_blocks=1, heads=4, low_res_size=4, classes=5),
}  # fmt: skip


def built(config: AdmConfig, seed: int = 0, **options: Any) -> AdmUNet:
    """A network all of whose weights matter: the fresh one is 0 behind every shortcut, and at its output."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AdmUNet(config, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def inputs(config: AdmConfig, batch: int = 3, height: int = 8, width: int = 8) -> dict[str, Tensor]:
    """Arguments of the network by name; the second sample has no class."""
    generator = torch.Generator().manual_seed(1)
    found = {
        "noisy": torch.randn(batch, config.channels, height, width, generator=generator),
        "time": torch.tensor([3.0, 999.75, 0.0])[:batch],
    }
    if config.classes:
        found["label"] = torch.tensor([1, config.classes, 0])[:batch]
    if config.low_res_size:
        found["low_res"] = torch.randn(batch, config.channels, height // 2, width // 2, generator=generator)
    return found


def referred(model: AdmUNet, arguments: dict[str, Tensor], *drop: Drop) -> tuple[Tensor, dict[str, Tensor]]:
    """Output of the reference and every gradient, of the loss of ``unet_reference.gradients``."""
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    reference = Reference(weights, model.config, *drop)
    out = reference(**arguments)
    assert reference.used == weights.keys()
    factors = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    found = torch.autograd.grad((out * factors + out.square()).mean(), list(weights.values()))
    return out, dict(zip(weights, found, strict=True))


def worst(got: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative difference of two tensors of one name, and that name."""
    assert got.keys() == expected.keys()
    return max((difference(got[name], expected[name]), name) for name in got)
