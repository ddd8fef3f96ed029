"""The text DiT against diffusers' network with the same weights, and against a plain one in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.config.networks.pixart import PixArtConfig
from fastdiff.config.networks.registry import network_of_class
from fastdiff.config.sections.objective import DdpmConfig
from fastdiff.diffusion.objective import Objective
from fastdiff.errors import ConfigError
from fastdiff.models.build import build_deferred, build_model
from fastdiff.models.pixart.block import CrossAttention, PixArtBlock, SelfAttention
from fastdiff.models.pixart.embeddings import positions
from fastdiff.models.pixart.network import PixArt
from fastdiff_kernels import dispatch
from fastdiff_kernels.dispatch import Choice
from tests.support.references.pixart_reference import (
    SIZES,
    SMALL,
    built,
    diffusers_forward,
    diffusers_pixart,
    inputs,
    plain_forward,
)
from tests.support.references.unet_reference import difference, gradients

kinds = pytest.mark.parametrize("kind", SMALL)
sizes = pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")

SIGMA_256 = PixArtConfig(learn_sigma=True, pe_interpolation=0.5)
ALPHA_1024 = PixArtConfig(size=128, caption_tokens=120, learn_sigma=True, pe_interpolation=2.0, size_conditioning=True)


@sizes
@kinds
def test_output_and_every_gradient_equal_those_of_diffusers(kind: str, size: tuple[int, int]) -> None:
    config = SMALL[kind]
    ours, theirs = built(config), diffusers_pixart(config)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    arguments = inputs(config, height=size[0], width=size[1])
    got, expected = ours(**arguments), diffusers_forward(theirs, arguments)
    assert got.shape == (3, 8, *size)
    assert difference(got, expected) < 1e-5
    first, second = gradients(ours, got), gradients(theirs, expected)
    assert first.keys() == second.keys() == dict(ours.named_parameters()).keys()
    worst = max((difference(value, second[name]), name) for name, value in first.items() if not _is_zero(name))
    assert worst[0] < 1e-5, worst
    scale = max(float(value.norm()) for value in second.values())
    assert all(float(each[name].norm()) < 1e-6 * scale for each in (first, second) for name in each if _is_zero(name))


def _is_zero(name: str) -> bool:
    """Whether the gradient is rounding alone: a bias adds the same to the scores of all keys."""
    return name.endswith("to_k.bias")


@sizes
@kinds
def test_output_equals_a_plain_network_in_float64(kind: str, size: tuple[int, int]) -> None:
    model, arguments = built(SMALL[kind]), inputs(SMALL[kind], height=size[0], width=size[1])
    with torch.no_grad():
        assert difference(model(**arguments), plain_forward(model.config, model.state_dict(), arguments)) < 1e-5
        arguments |= {name: value.double() for name, value in arguments.items() if value.is_floating_point()}
        expected = plain_forward(model.config, model.state_dict(), arguments)
        # The positions are fp32, as published.
        assert difference(model.double()(**arguments), expected) < 1e-6


@kinds
def test_the_loss_equals_that_of_diffusers_network(kind: str) -> None:
    config = SMALL[kind]
    ours, theirs = built(config), diffusers_pixart(config)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    given = inputs(config)
    condition = {name: value for name, value in given.items() if name not in ("noisy", "time")}
    null = {"context": torch.zeros_like(given["context"][0]), "context_mask": given["context_mask"][0]}
    objective = Objective(
        DdpmConfig(schedule="linear", prediction="epsilon", variance="learned_range", condition_dropout=0.5),
        seed=3, null=null, device="cpu", inputs=tuple(config.conditions),
    )  # fmt: skip
    batch = Batch(given["noisy"], torch.arange(3), condition)
    corruption = objective.add_noise(batch)
    arguments = {"noisy": corruption.noisy, "time": corruption.levels.time, **corruption.condition}
    outputs = ours(**arguments), diffusers_forward(theirs, arguments)
    got, expected = (objective.loss(out, batch, corruption) for out in outputs)
    assert got.shape == (3,)
    assert difference(got, expected) < 1e-5


@kinds
def test_weights_go_both_ways(kind: str) -> None:
    config = SMALL[kind]
    theirs, ours = diffusers_pixart(config), built(config)
    weights = theirs.state_dict()
    ours.load_state_dict(weights, strict=True)
    assert all(torch.equal(value, weights[name]) for name, value in ours.state_dict().items())
    theirs.load_state_dict(built(config, seed=9).state_dict(), strict=True)


@pytest.mark.parametrize(
    ("config", "count"), [(SIGMA_256, 610_856_096), (ALPHA_1024, 611_349_152)], ids=["sigma", "alpha"]
)
def test_published_sizes_have_the_weights_of_diffusers(config: PixArtConfig, count: int) -> None:
    with torch.device("meta"):
        ours, theirs = PixArt(config), diffusers_pixart(config)
    assert sum(p.numel() for p in ours.parameters()) == count
    shapes = [{name: p.shape for name, p in model.state_dict().items()} for model in (ours, theirs)]
    assert shapes[0] == shapes[1]
    assert replace(PixArtConfig.from_diffusers(theirs.config), caption_tokens=config.caption_tokens) == config


def test_initial_weights_are_the_published_ones() -> None:
    config = PixArtConfig(depth=2, hidden=384, heads=6, size=8, caption_dim=64, size_conditioning=True)
    model = build_model(config, seed=2)
    found = model.state_dict()

    def std(name: str) -> float:
        return float(found[name].std())

    for name, value in found.items():
        zero = name.endswith("bias") or name == "proj_out.weight" or name.endswith("attn2.to_out.0.weight")
        assert zero == (not value.any()), name
    assert std("scale_shift_table") == pytest.approx(384**-0.5, rel=0.1)
    for n in range(2):
        block = f"transformer_blocks.{n}"
        assert std(f"{block}.scale_shift_table") == pytest.approx(384**-0.5, rel=0.1)
        # Of one matrix [3D, D], of one [2D, D], of a square one; a uniform distribution has its bound / sqrt(3).
        for layer, outputs in {"attn1.to_k": 3, "attn2.to_v": 2, "attn2.to_q": 1, "attn1.to_out.0": 1}.items():
            assert std(f"{block}.{layer}.weight") == pytest.approx((2 / (384 * (1 + outputs))) ** 0.5, rel=0.02)
    normal = [name for name in found if name.startswith(("adaln_single", "caption")) and name.endswith("weight")]
    assert len(normal) == 9
    for name in normal:
        assert std(name) == pytest.approx(0.02, rel=0.05), name
    assert not model(**inputs(config)).any()


def test_initial_weights_are_drawn_one_by_one_to_the_bit() -> None:
    whole, deferred = build_model(SMALL["alpha"], seed=5), build_deferred(SMALL["alpha"], seed=5)
    drawn = dict(deferred.weights())
    assert drawn.keys() == whole.state_dict().keys()
    assert all(torch.equal(value, drawn[name]) for name, value in whole.state_dict().items())


def test_positions_are_those_of_diffusers() -> None:
    from diffusers.models.embeddings import get_2d_sincos_pos_embed

    for height, width in ((16, 16), (12, 24)):
        got = positions(48, height, width, base=16, divisor=0.5)
        theirs = get_2d_sincos_pos_embed(48, (height, width), base_size=16, interpolation_scale=0.5)
        torch.testing.assert_close(got.flatten(0, 1), theirs.float(), rtol=0, atol=1e-7)


@kinds
def test_padding_changes_nothing(kind: str) -> None:
    model, arguments = built(SMALL[kind]), inputs(SMALL[kind])
    with torch.no_grad():
        whole = model(**arguments)
        for n, length in enumerate(arguments["context_mask"].sum(1).tolist()):
            alone = {name: value[n : n + 1] for name, value in arguments.items()}
            alone |= {name: alone[name][:, :length] for name in ("context", "context_mask")}
            assert difference(model(**alone), whole[n : n + 1]) < 1e-6
        filled = arguments["context"].masked_fill(~arguments["context_mask"][..., None], 7.0)
        assert torch.equal(model(**(arguments | {"context": filled})), whole)


@pytest.mark.parametrize("attention", ["auto", "reference"])
def test_recomputed_and_compiled_blocks_compute_the_same(attention: Any) -> None:
    arguments = inputs(SMALL["alpha"])

    def results(**options: Any) -> dict[str, Tensor]:
        compiled, stored = options.pop("compiled", False), options.pop("stored", 0)
        model = built(SMALL["alpha"], **options).store_blocks(stored)
        if compiled:
            torch._dynamo.reset()
            model.compile_blocks(backend="aot_eager")
        out = model(**arguments)
        return {"": out.detach(), **gradients(model, out)}

    plain = results()
    for stored in range(SMALL["alpha"].depth + 1):
        again = results(recompute=True, stored=stored)
        assert all(torch.equal(again[name], value) for name, value in plain.items())
    for other in (results(recompute=True), results(attention=attention, compiled=True)):
        assert other.keys() == plain.keys()
        assert max(difference(other[name], plain[name]) for name in plain if not _is_zero(name)) < 1e-5


def test_with_the_kernels_it_computes_the_same() -> None:
    arguments = inputs(SMALL["sigma"])
    plain, kernels = built(SMALL["sigma"]), built(SMALL["sigma"])
    expected = plain(**arguments)
    with dispatch.forced(adaln="triton"):
        got = kernels(**arguments)
        found = gradients(kernels, got)
    assert difference(got, expected) < 1e-5
    wanted = gradients(plain, expected)
    assert max(difference(found[name], wanted[name]) for name in wanted if not _is_zero(name)) < 1e-5


def test_layers_say_what_they_use() -> None:
    found = dict(dispatch.explain(built(SMALL["sigma"]), torch.zeros(1)))
    assert len(found) == 2 * 3 + 1
    assert found["transformer_blocks.0.attn2"].why == "torch's choice with a mask"
    model = built(SMALL["sigma"], attention="reference")
    for module in model.modules():
        if isinstance(module, SelfAttention | CrossAttention):
            assert [*module.choices(torch.zeros(1))] == [Choice("attention", "reference", "reference", "asked for")]
        if isinstance(module, PixArtBlock):
            assert [choice.op for choice in module.choices(torch.zeros(1))] == ["adaln"]


PUBLISHED: dict[str, Any] = {
    "_class_name": "Transformer2DModel", "activation_fn": "gelu-approximate", "attention_bias": True,
    "attention_head_dim": 72, "attention_type": "default", "caption_channels": 4096, "cross_attention_dim": 1152,
    "double_self_attention": False, "dropout": 0.0, "in_channels": 4, "interpolation_scale": 2,
    "norm_elementwise_affine": False,
    "norm_eps": 1e-06, "norm_num_groups": 32, "norm_type": "ada_norm_single", "num_attention_heads": 16,
    "num_embeds_ada_norm": 1000, "num_layers": 28, "num_vector_embeds": None, "only_cross_attention": False,
    "out_channels": 8, "patch_size": 2, "sample_size": 128, "upcast_attention": False, "use_linear_projection": False,
}  # fmt: skip
"""As pipelines of the former class have it."""


def test_configurations_of_the_former_class_are_read() -> None:
    kind = network_of_class("Transformer2DModel", "a pipeline")
    assert kind is PixArtConfig is network_of_class("PixArtTransformer2DModel", "a pipeline")
    assert replace(PixArtConfig.from_diffusers(PUBLISHED), caption_tokens=120) == ALPHA_1024
    sigma = PixArtConfig.from_diffusers(PUBLISHED | {"sample_size": 32, "interpolation_scale": 0.5})
    assert sigma == SIGMA_256
    assert PixArtConfig.from_diffusers(PUBLISHED | {"out_channels": None}).learn_sigma is False


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"norm_type": "ada_norm_zero"}, "norm_type 'ada_norm_zero', expected 'ada_norm_single'"),
        ({"out_channels": 9}, "out_channels 9, expected in_channels 4, or twice as many"),
        ({"caption_channels": None}, "caption_channels None, expected an integer"),
        ({"cross_attention_dim": 768}, "cross_attention_dim 768, expected 1152"),
        ({"attention_bias": False}, "attention_bias False, expected True"),
        ({"double_self_attention": True}, "double_self_attention True, expected False"),
    ],
)
def test_other_networks_are_refused_by_the_entry(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PixArtConfig.from_diffusers(PUBLISHED | entries)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"depth": 0}, "--model.depth 0: at least 1"),
        ({"heads": 5}, "not divisible by --model.heads 5"),
        ({"hidden": 30, "heads": 5}, "divisible by 4"),
        ({"hidden": 64, "heads": 4, "size_conditioning": True}, "--model.hidden 64 must be divisible by 3"),
        ({"size": 9}, "--model.size 9 is not divisible by --model.patch 2"),
        ({"pe_interpolation": 0.0}, "--model.pe_interpolation 0.0: a number above 0"),
    ],
)
def test_impossible_configurations_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PixArtConfig(**fields)


def test_inputs_that_do_not_fit_are_refused() -> None:
    alpha, sigma = built(SMALL["alpha"]), built(SMALL["sigma"])
    with pytest.raises(ConfigError, match="latents of 7 x 8: height and width must be divisible by the patch, 2"):
        sigma(**inputs(SMALL["sigma"], height=7))
    with pytest.raises(ConfigError, match="this PixArt takes time_ids, the sizes of the image,"):
        alpha(**inputs(SMALL["sigma"]))
    with pytest.raises(ConfigError, match="this PixArt takes no time_ids"):
        sigma(**inputs(SMALL["alpha"]))
