"""muP of the DiT and the PixArt: initial weights, the readout, refusals, and activations that do not grow by width."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.pixart import PixArtConfig
from fastdiff.config.presets import preset
from fastdiff.errors import ConfigError
from fastdiff.export.formats import format_of, formats_of
from fastdiff.models.build import build_deferred, build_model
from fastdiff.models.dit.fp8 import Fp8DiTBlock
from fastdiff_bench.measure.coordinates import measured, slopes
from tests.support.nights import by_day
from tests.support.references.pixart_reference import inputs

Config = DiTConfig | PixArtConfig
RATIOS = (1, 2, 4, 8)
"""Widths over that of the base."""
DIT = DiTConfig(depth=2, hidden=64, heads=4, patch=2, channels=1, size=8, classes=10, base_width=64)
PIXART = PixArtConfig(
    depth=2, hidden=48, heads=3, patch=2, channels=1, size=8, caption_dim=20, caption_tokens=9, size_conditioning=True,
    base_width=48,
)  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rms, swiglu, rotary, qk": {"norm": "rms-weight", "mlp": "swiglu", "rotary": True, "qk_norm": True},
    "single": {"modulation": "adaln-single"},
    "tokens": {"in_context": 2, "teacher_width": 12, "teacher_norm": True, "patch_bottleneck": 8},
    "sprint": {"depth": 4, "routing": "sprint", "routing_from": 1, "routing_to": 2},
    "values": {"value_residual": True, "rotary": True},
}
NETWORKS: dict[str, Config] = {
    **{name: replace(DIT, **options) for name, options in OPTIONS.items()},
    "pixart": PIXART,
}
"""Of the base width."""
ZERO = (
    "bias",
    "final_layer.linear.weight",
    "final_layer.linear_cls.weight",
    "proj_out.weight",
    "attn2.to_out.0.weight",
)
"""Ends of the names of weights that begin at zero."""
CONSTANT = ("in_context_posemb", "wg_norm.weight", "mask_token")


def at(ratio: int, base: Config = DIT, **changes: Any) -> Config:
    """The network, this many times as wide."""
    return replace(base, **{"hidden": ratio * base.hidden, "heads": ratio * base.heads, **changes})


@pytest.mark.parametrize("name", NETWORKS)
def test_initial_weights_have_the_sizes_of_the_table(name: str) -> None:
    """1 / inputs, 1 for classes, zeros at the output and in the biases (Zheng et al. 2025, arXiv:2505.15270)."""
    config = at(4, NETWORKS[name])
    model = build_model(config)
    for key, value in model.named_parameters():
        spread = value.detach().std().item() if value.numel() > 1 else 0.0
        if key.endswith(ZERO):
            assert not value.any(), key
        elif key == "y_embedder.embedding_table.weight":
            assert spread == pytest.approx(1.0, rel=0.05)
        elif key.endswith("scale_shift_table"):
            assert spread == pytest.approx(0.02, rel=0.1), key
        elif key not in CONSTANT and value.dim() > 1:
            error = 5 / (2 * value.numel()) ** 0.5  # five standard errors of a standard deviation
            assert spread == pytest.approx(value.shape[1:].numel() ** -0.5, rel=error), key
    deferred = dict(build_deferred(config).weights())
    assert all(torch.equal(deferred[key], value) for key, value in model.named_parameters())


@pytest.mark.parametrize(
    ("base", "readout"), [(DIT, "final_layer.linear"), (PIXART, "proj_out")], ids=["dit", "pixart"]
)
def test_the_readout_is_divided_by_the_ratio_of_the_widths(base: Config, readout: str) -> None:
    """Its weight, not its bias."""
    wide, alike = (build_model(at(4, base, base_width=ratio * base.hidden)) for ratio in (1, 4))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        last = wide.get_submodule(readout)
        last.bias.fill_(0.5)
        last.weight.normal_(generator=generator)
    alike.load_state_dict(wide.state_dict())
    if isinstance(base, PixArtConfig):
        given = inputs(base)
    else:
        x = torch.randn(2, 1, 8, 8, generator=generator)
        given = {"noisy": x, "time": torch.tensor([3, 700]), "label": torch.tensor([1, 10])}
    torch.testing.assert_close(wide(**given) - 0.5, (alike(**given) - 0.5) / 4, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("base", [DIT, PIXART], ids=["dit", "pixart"])
def test_base_width_has_whole_heads(base: Config) -> None:
    for width, message in {
        40: r"--model.base_width 40 is no multiple of 16, the channels of a head.*give 32",
        -1: "--model.base_width -1: at least 0",
    }.items():
        with pytest.raises(ConfigError, match=message):
            replace(base, base_width=width)
    with pytest.raises(ConfigError, match=r"4 heads of 32 channels are not --model.hidden 64"):
        replace(DIT, head_dim=32, base_width=64)


def test_the_network_of_a_pipeline_has_no_base_width() -> None:
    """Neither that of pretrained weights, nor that of an export."""
    config = preset("pixart-256")
    with pytest.raises(ConfigError, match=r"--model.base_width 288 with --pretrained.weights: .* from random weights"):
        replace(
            config,
            model=replace(config.model, base_width=288),  # type: ignore[call-arg]
            pretrained=replace(config.pretrained, weights=True),
        )
    assert list(formats_of(PIXART)) == ["lora", "safetensors"]
    with pytest.raises(ConfigError, match=r"diffusers: its network lacks --model.base_width 48 .*use safetensors"):
        format_of(PIXART, "diffusers")


def test_its_blocks_may_multiply_in_fp8() -> None:
    assert Fp8DiTBlock.problem(DIT) is None
    assert "has --model.rotary" in str(Fp8DiTBlock.problem(replace(DIT, rotary=True)))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_multipliers_are_those_of_hidden_matrices(name: str) -> None:
    """Every matrix of which both sides grow with the width, and no other parameter, whatever the options are."""
    small, large = (dict(build_model(at(ratio, NETWORKS[name])).named_parameters()) for ratio in (1, 2))
    config = at(2, NETWORKS[name])
    for key, value in large.items():
        grown = sum(a > b for a, b in zip(value.shape, small[key].shape, strict=True))
        assert config.lr_multiplier(key) == (0.5 if grown == 2 else 1.0), key


@pytest.mark.parametrize("name", by_day(["plain", "rms, swiglu, rotary, qk", "pixart"], "single", "tokens", "values"))
def test_activations_do_not_grow_with_the_width(name: str) -> None:
    """The coordinate check of Yang et al. 2022 (arXiv:2203.03466, appendix D.1), which fails without muP.

    Exponents of the width in the changes; measured: 0.06 at most, of the PixArt 0.10, where a third of the width is
    narrow, and without muP the largest is 0.8 to 1.6.
    """
    base = NETWORKS[name]
    found = {
        width: slopes(measured([at(ratio, base, base_width=width) for ratio in RATIOS], steps=3, lr=2e-3))
        for width in (base.hidden, 0)
    }
    assert max(map(abs, found[base.hidden].values())) < 0.15, found
    assert max(map(abs, found[0].values())) > 0.5, found
