"""The diffusion transformer: against the paper's equations and the published checkpoints."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdiff.config.networks.dit import DIT_PATCHES, DIT_SIZES, DiTConfig, dit_config
from fastdiff.errors import ConfigError
from fastdiff.models.build import build_model, load_model
from fastdiff.models.dit.network import DiT
from fastdiff.models.embeddings import PatchConv2d, position_table, timestep_sinusoids
from fastdiff_bench.correctness.accuracy import assert_no_worse
from fastdiff_kernels import dispatch
from fastdiff_kernels.adaln import launches
from fastdiff_kernels.dispatch import Choice
from tests.support.dispatch_modes import Strides
from tests.support.recomputed import calls_of, check_calls
from tests.support.references.dit_reference import reference_forward, reference_position, trained

SMALL = DiTConfig(depth=2, hidden=24, heads=3, patch=2, size=6, channels=3, classes=5, learn_sigma=True)

# Millions, with learn_sigma, 32 x 32 x 4 latents and pos_embed: research/features.md, section 1D.
PUBLISHED_MILLIONS = {"S": 32.96, "B": 130.51, "L": 458.10, "XL": 675.13}


def inputs(config: DiTConfig = SMALL, batch: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    noisy = torch.randn(batch, config.channels, config.size, config.size, generator=generator)
    time = torch.tensor([0, 1, 500, 999])[:batch]
    return noisy, time, torch.tensor([0, config.classes, 2, 1])[:batch]


def expected_shapes(config: DiTConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a published checkpoint, written out by hand."""
    d, inner = config.hidden, int(config.hidden * config.mlp_ratio)
    tokens = (config.size // config.patch) ** 2
    out = config.patch**2 * config.channels * (2 if config.learn_sigma else 1)
    shapes: dict[str, tuple[int, ...]] = {
        "pos_embed": (1, tokens, d),
        "x_embedder.proj.weight": (d, config.channels, config.patch, config.patch),
        "x_embedder.proj.bias": (d,),
        "t_embedder.mlp.0.weight": (d, 256),
        "t_embedder.mlp.0.bias": (d,),
        "t_embedder.mlp.2.weight": (d, d),
        "t_embedder.mlp.2.bias": (d,),
        "y_embedder.embedding_table.weight": (config.classes + 1, d),
        "final_layer.linear.weight": (out, d),
        "final_layer.linear.bias": (out,),
        "final_layer.adaLN_modulation.1.weight": (2 * d, d),
        "final_layer.adaLN_modulation.1.bias": (2 * d,),
    }
    layers = {
        "attn.qkv": (3 * d, d),
        "attn.proj": (d, d),
        "mlp.fc1": (inner, d),
        "mlp.fc2": (d, inner),
        "adaLN_modulation.1": (6 * d, d),
    }
    for n in range(config.depth):
        for name, (rows, columns) in layers.items():
            shapes[f"blocks.{n}.{name}.weight"] = (rows, columns)
            shapes[f"blocks.{n}.{name}.bias"] = (rows,)
    return shapes


def test_forward_equals_the_papers_equations() -> None:
    model = trained(SMALL).double()
    noisy, time, label = inputs()
    expected = reference_forward(dict(model.named_parameters()), SMALL, noisy, time, label)
    got = model(noisy, time, label)
    assert got.shape == (4, 6, 6, 6)
    assert got.dtype == torch.float64
    # 1e-6: pos_embed is kept in fp32, everything else is fp64.
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_fp32_is_as_close_as_fp32_allows() -> None:
    noisy, time, label = inputs()
    exact = trained(SMALL).double()(noisy, time, label)
    error = (trained(SMALL)(noisy, time, label).double() - exact).abs().max() / exact.abs().max()
    assert error < 1e-4


def test_time_may_be_fractional() -> None:
    model = trained(SMALL)
    noisy, time, label = inputs()
    assert torch.equal(model(noisy, time, label), model(noisy, time.double(), label))
    assert not torch.equal(model(noisy, time, label), model(noisy, time + 0.5, label))


@pytest.mark.parametrize("patch", DIT_PATCHES)
@pytest.mark.parametrize("letter", DIT_SIZES)
def test_published_parameter_counts(letter: str, patch: int) -> None:
    config = dit_config(f"DiT-{letter}/{patch}", learn_sigma=True)
    with torch.device("meta"):
        model = DiT(config)
    assert {k: tuple(v.shape) for k, v in model.state_dict().items()} == expected_shapes(config)
    total = sum(p.numel() for p in model.parameters()) + model.pos_embed.numel()
    if patch == 2:
        assert round(total / 1e6, 2) == PUBLISHED_MILLIONS[letter]
    if (letter, patch) == ("XL", 2):
        assert total == 675_129_632
        assert config.hidden // config.heads == 72


def test_unknown_size_names_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"DiT-XXL/2.*DiT-S/2.*DiT-XL/8"):
        dit_config("DiT-XXL/2")


def test_published_state_dict_loads_strictly_and_is_used() -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = expected_shapes(SMALL)
    published = {k: torch.randn(s, generator=generator) for k, s in shapes.items()}
    model = build_model(SMALL)
    model.load_state_dict(published, strict=True)
    assert torch.equal(model.pos_embed, published["pos_embed"])
    noisy, time, label = inputs()
    before = model(noisy, time, label)
    for name in shapes:
        changed = {**published, name: published[name] + torch.randn(shapes[name], generator=generator)}
        model.load_state_dict(changed, strict=True)
        assert not torch.equal(model(noisy, time, label), before), f"{name} has no effect"


def test_pos_embed_is_in_checkpoints_but_not_trained() -> None:
    model = build_model(SMALL)
    assert "pos_embed" in model.state_dict()
    assert "pos_embed" not in dict(model.named_parameters())
    error = position_table(24, 3)[0].double() - reference_position(3, 24)
    assert error.abs().max() < 6e-8


def test_fresh_model_outputs_exact_zero_and_blocks_are_the_identity() -> None:
    model = build_model(SMALL)
    assert torch.count_nonzero(model(*inputs())) == 0
    tokens, condition = torch.randn(2, 9, 24), torch.randn(2, 24)
    assert torch.equal(model.blocks[0](tokens, condition), tokens)


def test_fresh_weights_have_the_published_scales() -> None:
    model = build_model(dit_config("DiT-S/2"))
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if name.endswith("bias") or "adaLN" in name or name.startswith("final_layer.linear"):
            assert torch.count_nonzero(value) == 0, name
        elif "t_embedder" in name or "y_embedder" in name:
            assert value.std() == pytest.approx(0.02, rel=0.03), name
        else:
            fan_out, fan_in = value.flatten(1).shape
            bound = math.sqrt(6 / (fan_in + fan_out))
            assert value.abs().max() <= bound, name
            assert value.std() == pytest.approx(bound / math.sqrt(3), rel=0.03), name


def test_initial_weights_are_a_function_of_the_seed_and_leave_the_global_state() -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = build_model(SMALL, seed=7).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    again, other = build_model(SMALL, seed=7).state_dict(), build_model(SMALL, seed=8).state_dict()
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first["blocks.1.mlp.fc1.weight"], other["blocks.1.mlp.fc1.weight"])
    assert not torch.equal(first["blocks.0.mlp.fc1.weight"], first["blocks.1.mlp.fc1.weight"])
    build_model(SMALL, seed=-1)


@pytest.mark.parametrize("bit", [32, 40, 63])
def test_every_bit_of_the_seed_counts(bit: int) -> None:
    """torch's generator of the CPU takes 32 of them; below those, weights are those of torch.manual_seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        plain = type(build_model(SMALL))(SMALL).state_dict()
    first, other, wrapped = (build_model(SMALL, seed=seed).state_dict() for seed in (7, 7 + 2**bit, 7 + 2**64))
    assert all(torch.equal(plain[key], value) and torch.equal(wrapped[key], value) for key, value in first.items())
    assert not torch.equal(first["blocks.1.mlp.fc1.weight"], other["blocks.1.mlp.fc1.weight"])


def test_no_label_is_the_null_class() -> None:
    model = trained(SMALL)
    noisy, time, label = inputs()
    null = torch.full_like(label, SMALL.classes)
    assert torch.equal(model(noisy, time, None), model(noisy, time, null))
    assert not torch.equal(model(noisy, time, None), model(noisy, time, torch.zeros_like(label)))


def test_samples_do_not_mix() -> None:
    model = trained(SMALL)
    noisy, time, label = inputs()
    for i in range(4):
        alone = model(noisy[i : i + 1], time[i : i + 1], label[i : i + 1])
        torch.testing.assert_close(alone[0], model(noisy, time, label)[i], rtol=1e-4, atol=1e-4)


def test_sides_that_the_patch_does_not_divide_are_refused() -> None:
    conv = PatchConv2d(4, 8, kernel_size=2, stride=2)
    with pytest.raises(ValueError, match=r"latents are 6 x 5, expected multiples of the patch, 2 x 2"):
        conv(torch.zeros(1, 4, 6, 5))


@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.float64])
def test_bf16_weights_take_any_input(given: torch.dtype) -> None:
    model = trained(SMALL).bfloat16()
    noisy, time, label = inputs()
    got = model(noisy.to(given), time, label)
    assert got.dtype == torch.bfloat16
    exact = trained(SMALL).double()(noisy, time, label)
    assert (got.double() - exact).abs().max() < 0.05 * exact.abs().max()


def test_angles_of_the_time_are_exact_for_bf16_weights() -> None:
    time = torch.tensor([997])
    exact = timestep_sinusoids(time, 256, torch.float64)
    assert timestep_sinusoids(time, 256, torch.bfloat16).dtype == torch.float32
    assert (timestep_sinusoids(time, 256, torch.bfloat16) - exact).abs().max() < 2e-4


def gradients(model: DiT) -> dict[str, Tensor]:
    model.zero_grad()
    model(*inputs()).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("stored", [0, 1, 2])
def test_recomputation_changes_no_gradient_and_runs_blocks_twice(stored: int) -> None:
    plain, recomputed = trained(SMALL), trained(SMALL, recompute=True).store_blocks(stored)
    calls = calls_of(recomputed)
    first, second = gradients(plain), gradients(recomputed)
    check_calls(recomputed, calls, stored)
    assert first.keys() == second.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert all(torch.count_nonzero(g) for g in first.values())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_kernels_give_the_gradients_of_the_reference(
    compiled: bool, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    run = launches.run

    def noted(kernel: Any, *args: Any, **options: Any) -> None:
        launched.append(kernel.__name__)
        run(kernel, *args, **options)

    monkeypatch.setattr(launches, "run", noted)
    exact, eager = gradients(trained(SMALL).double()), gradients(trained(SMALL))
    assert not launched
    model = trained(SMALL, recompute=recompute)
    if compiled:
        torch._dynamo.reset()
        model.compile_blocks(backend="aot_eager")
    with dispatch.forced(adaln="triton"):
        ours = gradients(model)
    assert_no_worse(ours, eager, exact)
    # Two per block and one in the last layer, which is neither compiled nor recomputed.
    blocks = 2 * SMALL.depth
    assert launched.count("adaln_fwd_kernel") == 1 + blocks * (2 if recompute else 1)
    assert launched.count("adaln_bwd_kernel") == 1 + blocks
    assert launched.count("adaln_gate_bwd_kernel") == SMALL.depth


@pytest.mark.parametrize("compiled", [False, True])
def test_the_residual_stream_and_its_gradients_are_contiguous(compiled: bool) -> None:
    """Else every block writes transposed tokens, and copies every gradient that another block hands to it."""
    torch._dynamo.reset()
    model = trained(SMALL)
    if compiled:
        model.compile_blocks(backend="aot_eager")
    streams: list[tuple[int, ...]] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, given, out: streams.extend(x.stride() for x in (given[0], out)))
    forward, backward = Strides(), Strides()
    with dispatch.forced(adaln="triton"):
        with nullcontext() if compiled else forward:
            out = model(*inputs())
        upstream = torch.ones_like(out)
        with backward:
            out.backward(upstream)
    assert streams == [(9 * 24, 24, 1)] * (2 * SMALL.depth)
    sums = {"gelu_backward": SMALL.depth, "bias_gradient_join": SMALL.depth}
    norms = {"adaln_backward": 1 + 2 * SMALL.depth, "gate_backward": SMALL.depth}
    assert backward.ops == norms | sums
    # The gradients of queries, keys and values may come in any order: they are read once, to be joined.
    assert not [line for line in forward.disordered + backward.disordered if "join" not in line]
    # The patches of the input and those of the output.
    assert compiled or forward.copied == [(4, 3, 3, 3, 2, 2), (4, 6, 3, 2, 3, 2)]
    assert backward.copied == [(4, 3, 3, 2, 2, 6)]  # the patches of the output


def test_layers_say_what_they_use() -> None:
    model, example = build_model(SMALL, attention="reference"), torch.zeros(1)
    assert dispatch.explain(model) == dispatch.explain(model, example)
    plain = Choice("adaln", "reference", "reference", "the tensor is on cpu")
    attention = Choice("attention", "reference", "reference", "asked for")
    assert dispatch.explain(model, example) == [
        ("blocks.0", plain),
        ("blocks.0.attn", attention),
        ("blocks.1", plain),
        ("blocks.1.attn", attention),
        ("final_layer", plain),
    ]
    model.compile_blocks()
    names = dict(dispatch.explain(model, example))
    inductor = "compile (Inductor)"
    assert names["blocks.0"] == Choice("adaln", inductor, inductor, "the tensor is on cpu; in a compiled block")
    with dispatch.forced(adaln="triton"):
        names = dict(dispatch.explain(model, example))
    assert names["blocks.1"] == Choice("adaln", "triton", "triton", "forced")
    assert names["final_layer"] == Choice("adaln", "triton", "triton", "forced")


def test_attention_is_what_was_asked_for() -> None:
    expected = trained(SMALL)(*inputs())
    weights = {name: parameter.detach() for name, parameter in trained(SMALL).named_parameters()}
    for model in (trained(SMALL, attention="reference"), load_model(SMALL, weights, attention="reference")):
        torch.testing.assert_close(model(*inputs()), expected, rtol=1e-4, atol=1e-4)
        assert dict(dispatch.explain(model, torch.zeros(1)))["blocks.1.attn"].forward == "reference"
    with pytest.raises(RuntimeError, match="flash"):
        trained(SMALL, attention="flash")(*inputs())
