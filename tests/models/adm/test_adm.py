"""The UNet of IDDPM and ADM: against the papers' equations and the published sizes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdiff.config.networks.adm import AdmConfig
from fastdiff.errors import ConfigError
from fastdiff.models.adm.network import AdmUNet
from fastdiff.models.build import build_model, load_model
from fastdiff.rng import dropout_stream
from fastdiff_kernels import dispatch, philox
from fastdiff_kernels.dispatch import Choice
from tests.support.references.adm_networks import SMALL, built, inputs, referred, worst
from tests.support.references.adm_reference import Drop
from tests.support.references.unet_reference import difference, gradients

kinds = pytest.mark.parametrize("kind", SMALL)


@kinds
def test_output_and_every_gradient_equal_the_papers_equations(kind: str) -> None:
    model, arguments = built(SMALL[kind]).double(), inputs(SMALL[kind])
    expected, slopes = referred(model, arguments)
    got = model(**arguments)
    assert got.dtype == torch.float64
    assert got.shape == expected.shape == (3, 6 if model.config.learn_sigma else 3, 8, 8)
    assert difference(got, expected) < 1e-12
    found = worst(gradients(model, got), slopes)
    assert found[0] < 1e-11, found


@kinds
def test_fp32_is_as_close_as_fp32_allows(kind: str) -> None:
    """One rounding is 6e-8 of a number; about 50 operations in a row whose errors add up at random make 1e-6.

    Ten times that where a gradient is a difference of larger numbers.
    """
    model, arguments = built(SMALL[kind]), inputs(SMALL[kind])
    expected, slopes = referred(model, arguments)
    got = model(**arguments)
    assert difference(got, expected) < 4e-6
    found = worst(gradients(model, got), slopes)
    assert found[0] < 4e-5, found


def test_without_labels_there_is_no_class() -> None:
    model, arguments = built(SMALL["iddpm"]), inputs(SMALL["iddpm"])
    nobody = {**arguments, "label": torch.full((3,), model.config.classes)}
    without = {name: value for name, value in arguments.items() if name != "label"}
    assert torch.equal(model(**nobody), model(**without))
    assert not torch.equal(model(**arguments)[0], model(**without)[0])
    unconditional, given = built(SMALL["lsun"]), inputs(SMALL["lsun"])
    assert torch.equal(unconditional(**given, label=torch.zeros(3, dtype=torch.int64)), unconditional(**given))


_ADM: dict[str, Any] = {
    "attention_resolutions": (32, 16, 8), "res_blocks": 2, "resblock_updown": True, "classes": 1000,
    "learn_sigma": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "millions"),
    [
        ({"size": 64, "width": 192, "head_channels": 64, "res_blocks": 3}, 296),
        ({"size": 128, "width": 256, "channel_mult": (1, 1, 2, 3, 4), "heads": 4}, 422),
        ({"size": 256, "width": 256, "channel_mult": (1, 1, 2, 2, 4, 4), "head_channels": 64}, 554),
        ({"size": 512, "width": 256, "channel_mult": (0.5, 1, 1, 2, 2, 4, 4), "head_channels": 64}, 559),
    ],
)
def test_the_sizes_of_adm(fields: dict[str, Any], millions: int) -> None:
    """Dhariwal & Nichol 2021, the table of hyperparameters for ImageNet at 64, 128, 256 and 512 pixels."""
    with torch.device("meta"):
        model = AdmUNet(AdmConfig(**_ADM | fields))
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions


@kinds
def test_a_fresh_network_outputs_exactly_0(kind: str) -> None:
    arguments = inputs(SMALL[kind])
    assert not build_model(SMALL[kind], seed=3)(**arguments).count_nonzero()


@kinds
def test_weights_of_a_file_give_the_same_network(kind: str) -> None:
    model, arguments = built(SMALL[kind]), inputs(SMALL[kind])
    assert torch.equal(load_model(SMALL[kind], dict(model.named_parameters()))(**arguments), model(**arguments))
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()
    with pytest.raises(RuntimeError, match=r"time_embed\.0\.weight"):
        load_model(SMALL[kind], {k: v for k, v in model.named_parameters() if k != "time_embed.0.weight"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 0}, "width 0: at least 1"),
        ({"res_blocks": 0}, "res_blocks 0: at least 1"),
        ({"classes": -1}, "classes -1: at least 0"),
        ({"dropout": 1.0}, "dropout 1.0: at least 0, below 1"),
        ({"channel_mult": ()}, "channel_mult: one entry per level"),
        ({"width": 33, "norm_num_groups": 1}, "width 33 must be even"),
        ({"size": 60}, "size 60 must be divisible by 8"),
        (
            {"channel_mult": (1, 2, 3, 4.1)},
            "a level of 524 channels, which must be divisible by --model.norm_num_groups 32",
        ),
        ({"attention_resolutions": (16, 7)}, r"the maps have sizes \(64, 32, 16, 8\), not \[7\]"),
        ({"heads": 5}, "heads 5 does not divide the .* channels of a level with attention"),
        ({"head_channels": 48}, "head_channels 48 does not divide"),
        ({"low_res_size": 64}, "low_res_size 64: smaller than --model.size 64"),
    ],
)
def test_impossible_configurations_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AdmConfig(**fields)


def test_inputs_that_do_not_fit_are_refused() -> None:
    plain, large = (built(SMALL[kind]) for kind in ("lsun", "upsampler"))
    with pytest.raises(ConfigError, match=r"10 x 8: this UNet halves them 2 times.*be divisible by 4"):
        plain(**inputs(SMALL["lsun"], height=10))
    arguments = inputs(SMALL["upsampler"])
    small = arguments.pop("low_res")
    with pytest.raises(ConfigError, match="low_res_size 4: the low-resolution images are missing"):
        large(**arguments)
    with pytest.raises(ConfigError, match="low_res_size 0: the low-resolution images are unexpected"):
        plain(**inputs(SMALL["lsun"]), low_res=small)
    for wrong in (small[:2], small[:, :1]):
        with pytest.raises(
            ConfigError, match=rf"low-resolution images of shape .*{wrong.shape[0]}, {wrong.shape[1]}, 4, 4\)"
        ):
            large(**arguments, low_res=wrong)


def dropped(p: float, seed: int, position: Tensor) -> Drop:
    """The same masks from the definition: elements in the order of height, width, channels."""

    def drop(block: int, x: Tensor) -> Tensor:
        share = philox.uniform(seed, dropout_stream(block), position, x[0].numel())
        kept = share.view(x.shape[0], *x.shape[2:], x.shape[1]).permute(0, 3, 1, 2) >= p
        return x * kept / (1 - p)

    return drop


@kinds
def test_each_block_drops_before_its_last_convolution_what_the_position_says(kind: str) -> None:
    config, position = replace(SMALL[kind], dropout=0.3), torch.tensor([5, 2**40, 7])
    model, arguments = built(config, dropout_seed=2**63 + 1).double(), inputs(config)
    expected, slopes = referred(model, arguments, dropped(0.3, 2**63 + 1, position))
    got = model(**arguments, position=position)
    assert difference(got, expected) < 1e-12
    found = worst(gradients(model, got), slopes)
    assert found[0] < 1e-11, found


def test_nothing_is_dropped_without_a_position_or_a_dropout() -> None:
    config, arguments, position = SMALL["iddpm"], inputs(SMALL["iddpm"]), torch.arange(3)
    plain, dropping = built(config), built(replace(config, dropout=0.3))
    assert torch.equal(plain(**arguments, position=position), plain(**arguments))
    assert torch.equal(dropping(**arguments), plain(**arguments))
    assert difference(dropping(**arguments, position=position), plain(**arguments)) > 0.1


def test_layers_say_what_they_use() -> None:
    config, example = replace(SMALL["iddpm"], dropout=0.1), torch.zeros(1)
    model = built(config, attention="reference")
    why = "the tensor is on cpu"
    plain, drop = (Choice(op, "reference", "reference", why) for op in ("group_norm", "dropout"))
    attention = Choice("attention", "reference", "reference", "asked for")
    block, attending = "input_blocks.1.0", "middle_block.1"

    def said() -> dict[str, list[Choice]]:
        found: dict[str, list[Choice]] = {}
        for name, choice in dispatch.explain(model, example):
            found.setdefault(name, []).append(choice)
        return found

    names = said()
    assert (names[""], names[block], names[attending]) == ([plain], [plain, drop], [plain, attention])
    assert len(names) == 1 + sum(isinstance(module, AdmUNet.block_classes) for module in model.modules())
    model.compile_blocks()
    by = "compile (Inductor)"
    inside = [Choice(op, by, by, f"{why}; in a compiled block") for op in ("group_norm", "dropout")]
    names = said()
    assert (names[""], names[block], names[attending]) == ([plain], inside, [plain, attention])
    with dispatch.forced(group_norm="triton", dropout="triton"):
        names = said()
    assert names[block] == [Choice(op, "triton", "triton", "forced") for op in ("group_norm", "dropout")]
    assert [c.op for name, c in dispatch.explain(built(SMALL["iddpm"]), example) if name == block] == ["group_norm"]
