"""muP of the DiT: initial weights, the readout, refusals, and activations that do not grow with the width."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.errors import ConfigError
from fastdiff.models.build import build_deferred, build_model
from fastdiff.models.dit.fp8 import Fp8DiTBlock
from fastdiff_bench.measure.coordinates import measured, slopes
from tests.support.nights import by_day

HEAD = 16
WIDTHS = (64, 128, 256, 512)
BASE = DiTConfig(depth=2, hidden=64, heads=4, patch=2, channels=1, size=8, classes=10, base_width=64)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rms, swiglu, rotary, qk": {"norm": "rms-weight", "mlp": "swiglu", "rotary": True, "qk_norm": True},
    "single": {"modulation": "adaln-single"},
    "tokens": {"in_context": 2, "teacher_width": 12, "teacher_norm": True, "patch_bottleneck": 8},
    "sprint": {"depth": 4, "routing": "sprint", "routing_from": 1, "routing_to": 2},
    "values": {"value_residual": True, "rotary": True},
}


def at(width: int, **changes: object) -> DiTConfig:
    return replace(BASE, hidden=width, heads=width // HEAD, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OPTIONS)
def test_initial_weights_have_the_sizes_of_the_table(name: str) -> None:
    """1 / inputs, 1 for classes, zeros at the output and in the biases (Zheng et al. 2025, arXiv:2505.15270)."""
    config = at(256, **OPTIONS[name])
    model = build_model(config)
    constant = {"in_context_posemb", "wg_norm.weight", "mask_token"}
    for key, value in model.named_parameters():
        spread = value.detach().std().item() if value.numel() > 1 else 0.0
        if key.startswith(("final_layer.linear", "final_layer.linear_cls")) or key.endswith("bias"):
            assert not value.any(), key
        elif key == "y_embedder.embedding_table.weight":
            assert spread == pytest.approx(1.0, rel=0.05)
        elif key.endswith("scale_shift_table"):
            assert spread == pytest.approx(0.02, rel=0.1), key
        elif key not in constant and value.dim() > 1:
            error = 4 / (2 * value.numel()) ** 0.5  # four standard errors of a standard deviation
            assert spread == pytest.approx(value.shape[1:].numel() ** -0.5, rel=error), key
    deferred = dict(build_deferred(config).weights())
    assert all(torch.equal(deferred[key], value) for key, value in model.named_parameters())


def test_the_readout_is_divided_by_the_ratio_of_the_widths() -> None:
    """Its weight, not its bias."""
    wide, alike = (build_model(at(256, base_width=base)) for base in (64, 256))
    alike.load_state_dict(wide.state_dict())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for model in (wide, alike):
            model.final_layer.linear.bias.fill_(0.5)
        weight = torch.randn(wide.final_layer.linear.weight.shape, generator=generator)
        wide.final_layer.linear.weight.copy_(weight)
        alike.final_layer.linear.weight.copy_(weight)
    x, t, y = torch.randn(2, 1, 8, 8, generator=generator), torch.tensor([3, 700]), torch.tensor([1, 10])
    torch.testing.assert_close(wide(x, t, y) - 0.5, (alike(x, t, y) - 0.5) / 4, rtol=1e-5, atol=1e-6)


def test_base_width_has_whole_heads() -> None:
    for changes, message in {
        (("base_width", 40),): r"--model.base_width 40 is no multiple of 16, the channels of a head.*give 32",
        (("head_dim", 32), ("base_width", 64)): "4 heads of 32 channels are not --model.hidden 64",
        (("base_width", -1),): "--model.base_width -1: at least 0",
    }.items():
        with pytest.raises(ConfigError, match=message):
            replace(BASE, **dict(changes))  # type: ignore[arg-type]


def test_its_blocks_may_multiply_in_fp8() -> None:
    assert Fp8DiTBlock.problem(BASE) is None
    assert "has --model.rotary" in str(Fp8DiTBlock.problem(replace(BASE, rotary=True)))


def test_the_multipliers_are_those_of_hidden_matrices() -> None:
    """Every matrix of which both sides grow with the width, and no other parameter, whatever the options are."""
    for options in OPTIONS.values():
        small, large = (dict(build_model(at(width, **options)).named_parameters()) for width in (64, 128))
        config = at(128, **options)
        for key, value in large.items():
            grown = sum(a > b for a, b in zip(value.shape, small[key].shape, strict=True))
            assert config.lr_multiplier(key) == (0.5 if grown == 2 else 1.0), key


@pytest.mark.parametrize("name", by_day(["plain", "rms, swiglu, rotary, qk"], "single", "tokens", "values"))
def test_activations_do_not_grow_with_the_width(name: str) -> None:
    """The coordinate check of Yang et al. 2022 (arXiv:2203.03466, appendix D.1), which fails without muP.

    Exponents of the width in the changes; measured: 0.06 at most, and without muP the largest is 0.8 to 1.6.
    """
    found = {
        base: slopes(measured([at(width, base_width=base, **OPTIONS[name]) for width in WIDTHS], steps=3, lr=2e-3))
        for base in (64, 0)
    }
    assert max(map(abs, found[64].values())) < 0.15, found
    assert max(map(abs, found[0].values())) > 0.5, found
