"""Qwen-Image: its published file, variants that are refused, full captions, and caches of the class."""

import gc
import weakref
from typing import Any

import pytest
import torch

from fastdiff.config.networks.qwen_image import QwenImageConfig
from fastdiff.errors import ConfigError
from tests.support.references.transformer_families import FAMILIES, built, conditions, noisy, theirs

CONFIG = FAMILIES["qwen-image"].config
_SIGMA = torch.tensor([0.1, 0.45, 0.98])
_PUBLISHED = {
    "_class_name": "QwenImageTransformer2DModel", "_diffusers_version": "0.34.0.dev0", "attention_head_dim": 128,
    "axes_dims_rope": [16, 56, 56], "guidance_embeds": False, "in_channels": 64, "joint_attention_dim": 3584,
    "num_attention_heads": 24, "num_layers": 60, "out_channels": 16, "patch_size": 2, "pooled_projection_dim": 768,
}  # fmt: skip


def test_the_published_file_is_the_default() -> None:
    assert QwenImageConfig.from_diffusers(_PUBLISHED) == QwenImageConfig()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"guidance_embeds": True}, r"has guidance_embeds True, expected False, for a Qwen-Image; another variant"),
        ({"use_layer3d_rope": True}, r"has use_layer3d_rope True, expected False"),
        ({"in_channels": 16}, r"has in_channels 16, expected 64"),
        ({"axes_dims_rope": [16, 56, 60]}, r"--model.axes_dims_rope 16 56 60: expected a sum of 128"),
    ],
)
def test_another_variant_is_refused(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QwenImageConfig.from_diffusers(_PUBLISHED | entries)


@torch.no_grad()
def test_a_whole_batch_of_full_captions_is_read_as_without_a_mask() -> None:
    """diffusers' pipelines drop the mask then; a run never does, so that one graph serves every batch."""
    model = built(CONFIG)
    given = conditions(CONFIG)
    given["context_mask"] = torch.ones_like(given["context_mask"])
    found = model(noisy(CONFIG), _SIGMA, **given)
    expected, _ = FAMILIES["qwen-image"].step(
        theirs(CONFIG, model.state_dict()), noisy(CONFIG), noisy(CONFIG), _SIGMA, {**given, "context_mask": None}
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_nothing_holds_a_network_that_is_gone() -> None:
    """Caches of the class's methods would keep its rotary tables."""
    model = built(CONFIG)
    model(noisy(CONFIG), _SIGMA, **conditions(CONFIG)).sum().backward()
    held = weakref.ref(model.network.pos_embed)
    del model
    gc.collect()
    assert held() is None
