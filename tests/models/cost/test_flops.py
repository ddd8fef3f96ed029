"""Floating-point operations of networks, against torch's own counter."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fastdiff.config.networks.adm import AdmConfig
from fastdiff.config.networks.dit import DiTConfig, dit_config
from fastdiff.config.networks.pixart import PixArtConfig
from fastdiff.config.networks.pretrained import CAPTION_TOKENS
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.config.presets import PRESETS
from fastdiff.models.build import build_model
from fastdiff.models.cost.flops import forward_flops, training_flops
from tests.support.references.pixart_reference import SMALL as SMALL_PIXARTS
from tests.support.references.unet_reference import SMALL

NETWORKS: dict[ModelConfig, list[str]] = {}
"""Each network of a preset once, with the presets that train it."""
for name in PRESETS:
    NETWORKS.setdefault(PRESETS[name]().model, []).append(name)

_BY_DAY = ("digits", "dit-s-8", "sit-xl-2")
"""Beginnings of the presets that are counted by day: every family, every size of a DiT and of its patches."""

# Two samples: a convolution without data takes a channels_last map of one sample for a contiguous one.
SAMPLES = 2


def arguments(config: ModelConfig) -> dict[str, Any]:
    """Inputs of the forward pass, as the loop gives them: without gradients."""
    found = {
        "noisy": torch.empty(SAMPLES, config.channels, config.size, config.size),
        "time": torch.zeros(SAMPLES, dtype=torch.int64),
    }
    if isinstance(config, PixArtConfig):
        masked = {"context_mask": torch.ones(SAMPLES, config.caption_tokens, dtype=torch.bool)}
        found |= masked | {"context": torch.empty(SAMPLES, config.caption_tokens, config.caption_dim)}
        return found | ({"time_ids": torch.ones(SAMPLES, 6)} if config.size_conditioning else {})
    if not isinstance(config, UNetConfig):
        found["label"] = torch.zeros(SAMPLES, dtype=torch.int64)
        if isinstance(config, AdmConfig) and config.low_res_size:
            found["low_res"] = torch.empty(SAMPLES, config.channels, config.low_res_size, config.low_res_size)
        return found
    found["context"] = torch.empty(SAMPLES, CAPTION_TOKENS, config.cross_attention_dim)
    if config.pooled_dim:
        found |= {"pooled": torch.empty(SAMPLES, config.pooled_dim), "time_ids": torch.empty(SAMPLES, 6)}
    return found


def counted(config: ModelConfig) -> tuple[float, float]:
    """Operations per sample of a forward pass, and of one with its backward pass."""
    # Fake tensors know the strides of a convolution's result, meta tensors do not, but they are faster.
    with torch.device("meta") if isinstance(config, DiTConfig) else FakeTensorMode():
        model = build_model(config, attention="reference")
        given = arguments(config)
        with FlopCounterMode(display=False) as both:
            with FlopCounterMode(display=False) as forward:
                prediction = model(**given)
            prediction.sum().backward()
    return forward.get_total_flops() / SAMPLES, both.get_total_flops() / SAMPLES


def check(config: ModelConfig) -> None:
    forward, both = counted(config)
    assert forward_flops(config) == pytest.approx(forward, rel=1e-6)
    assert training_flops(config) == pytest.approx(both, rel=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, id="+".join(presets), marks=() if presets[0].startswith(_BY_DAY) else pytest.mark.nightly)
        for config, presets in NETWORKS.items()
    ],
)
def test_flops_of_every_preset_agree_with_a_counter(config: ModelConfig) -> None:
    check(config)


def test_flops_of_a_unet_with_sizes_agree_with_a_counter() -> None:
    """As SDXL's: no preset has one."""
    check(SMALL["sdxl"])


@pytest.mark.parametrize(
    "config",
    [
        *SMALL_PIXARTS.values(),
        PixArtConfig(learn_sigma=True, pe_interpolation=0.5),
        PixArtConfig(size=128, caption_tokens=120, learn_sigma=True, pe_interpolation=2.0, size_conditioning=True),
    ],
    ids=[*SMALL_PIXARTS, "sigma-256", "alpha-1024"],
)
def test_flops_of_a_pixart_agree_with_a_counter(config: ModelConfig) -> None:
    check(config)


def test_flops_of_the_published_model() -> None:
    """118.6 G multiply-adds forward, so 712 GFLOP for a training step on one image."""
    config = dit_config("DiT-XL/2", learn_sigma=True)
    assert forward_flops(config) == pytest.approx(2 * 118.62e9, rel=1e-3)
    assert training_flops(config) == pytest.approx(712e9, rel=1e-2)
    assert training_flops(PRESETS["dit-xl-2-256"]().model) == pytest.approx(712e9, rel=1e-2)


def test_frozen_weights_and_an_estimate_change_the_passes() -> None:
    """A backward pass that computes no gradients of weights costs as much as a forward pass; so does DREAM."""
    config = PRESETS["dit-s-2-256"]().model
    full, adapter = training_flops(config), training_flops(config, adapter=True)
    assert full - adapter == pytest.approx(forward_flops(config))
    assert training_flops(config, dream=True) - full == pytest.approx(forward_flops(config))
