"""diffusers' transformers as networks of a run: the same step, compiled, recomputed and drawn as every network."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdiff.config.networks.diffusers_transformer import DiffusersTransformerConfig
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.flux2 import Flux2Config
from fastdiff.config.networks.qwen_image import QwenImageConfig
from fastdiff.config.networks.registry import networks
from fastdiff.config.networks.sd3 import SD3Config
from fastdiff.config.networks.z_image import ZImageConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.objective import DdpmConfig, FlowConfig
from fastdiff.diffusion.levels import TARGET_NOISE, TARGET_X0
from fastdiff.diffusion.processes import build_process
from fastdiff.errors import ConfigError
from fastdiff.models.blockwise import BlockwiseModel
from fastdiff.models.build import Model, build_deferred, build_model, load_model
from fastdiff.models.family import family_of
from tests.support.dispatch_modes import Costs
from tests.support.recomputed import calls_of, check_calls
from tests.support.references.transformer_families import (
    FAMILIES,
    SIZES,
    Family,
    built,
    conditions,
    noisy,
    theirs,
)
from tests.support.references.unet_reference import difference

families = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
_SIGMA = torch.tensor([0.1, 0.45, 0.98])
_FLUX2_9B = Flux2Config(num_layers=8, num_single_layers=24, num_attention_heads=32, joint_attention_dim=12288)
_SD35_LARGE = SD3Config(
    num_layers=38, num_attention_heads=38, caption_projection_dim=2432, pos_embed_max_size=192, dual_attention_layers=()
)


def ours(model: BlockwiseModel, latents: Tensor, noise: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return output and target of a step at the levels ``_SIGMA`` by the objective of a run."""
    convention = model.config.flow_convention
    assert convention is not None
    levels = build_process(FlowConfig(convention=convention), "cpu").levels(_SIGMA)
    sigma = _SIGMA[:, None, None, None]
    out = model((1 - sigma) * latents + sigma * noise, levels.time, **given)
    of_x0, of_noise = (levels.table[:, column, None, None, None] for column in (TARGET_X0, TARGET_NOISE))
    return out, of_x0 * latents + of_noise * noise


def test_every_adapter_has_a_family_of_tests() -> None:
    known = {kind for kind, config in networks().items() if issubclass(config, DiffusersTransformerConfig)}
    assert set(FAMILIES) == known


@families
@pytest.mark.parametrize("size", SIZES, ids=["square", "bucket"])
def test_a_step_is_that_of_the_class(family: Family, size: tuple[int, int]) -> None:
    """Output, loss and every gradient, in float64 arithmetic but for what the class itself keeps in fp32."""
    model = built(family.config)
    other = theirs(family.config, model.state_dict())
    latents, noise = noisy(family.config, size), torch.randn(3, family.config.channels, *size)
    given = conditions(family.config)
    found, target = ours(model, latents, noise, given)
    expected, their_target = family.step(other, latents, noise, _SIGMA, given)
    assert found.std() > 0.1
    assert difference(found, expected) < 1e-5
    losses = [(found - target).square().mean(), (expected - their_target).square().mean()]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    for loss in losses:
        loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: parameter.grad for name, parameter in other.named_parameters()}
    for name, parameter in model.named_parameters():
        expected_gradient = gradients[name]
        if expected_gradient is None or parameter.grad is None:
            assert expected_gradient is None or not expected_gradient.any(), name
            assert parameter.grad is None or not parameter.grad.any(), name
        elif expected_gradient.abs().max() > 1e-6:
            assert difference(parameter.grad, expected_gradient) < 1e-5, name
        else:
            assert parameter.grad.abs().max() < 2e-6, name


@families
def test_in_bf16_the_class_and_the_adapter_round_alike(family: Family) -> None:
    """The time is the phase of a sine and comes in fp32: rounded before the class does, it moves Z-Image by a quarter.

    Rotary tables are complex or in fp32 and must stay so; queries and keys are normed in the dtype of the weights.
    """
    model = built(family.config).bfloat16()
    other = theirs(family.config, built(family.config).state_dict()).bfloat16()

    def rounded(value: Any) -> Any:
        if isinstance(value, list):
            return [rounded(each) for each in value]
        several = isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1
        return value.bfloat16() if several else value

    def called(*given: Any, **named: Any) -> Any:
        return other(*map(rounded, given), **{name: rounded(value) for name, value in named.items()})

    given, latents = conditions(family.config), noisy(family.config)
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(3))
    found, _ = ours(model, latents, noise, given)
    expected, _ = family.step(called, latents, noise, _SIGMA, given)
    assert found.dtype == torch.bfloat16
    assert difference(found.float(), expected.float()) < 0.02
    found.float().square().mean().backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@families
def test_what_gets_no_gradient_is_not_trained(family: Family) -> None:
    """Weight decay would move it; whether its gradient is None or zero depends on the engine and the compiler."""
    model = built(family.config)
    other = theirs(family.config, model.state_dict())
    latents, noise = noisy(family.config), torch.randn(3, family.config.channels, *SIZES[0])
    found, target = family.step(other, latents, noise, _SIGMA, conditions(family.config))
    (found - target).square().mean().backward()  # type: ignore[no-untyped-call]
    without = {name for name, p in other.named_parameters() if p.grad is None or not p.grad.any()}
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == without
    of_family, drawn = family_of(family.config), build_model(family.config).state_dict()
    buffers, unused = of_family.buffers(family.config), of_family.unused(family.config)
    assert {*unused} == without
    assert {*buffers} == {name for name, _ in other.named_buffers() if name in other.state_dict()}
    assert all(torch.equal(drawn[name], value) for name, value in {**buffers, **unused}.items())


@families
def test_recomputation_of_none_some_or_all_blocks_changes_no_bit(family: Family) -> None:
    results = []
    for stored in (None, 0, 1, 2, len(built(family.config).blocks_in_order())):
        model = built(family.config, recompute=stored is not None).store_blocks(stored or 0)
        calls = calls_of(model)
        out = model(noisy(family.config), _SIGMA, **conditions(family.config))
        out.square().mean().backward()
        if stored is not None:
            check_calls(model, calls, stored)
        results.append([out, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@families
def test_one_graph_serves_each_shape(family: Family) -> None:
    """No break in a block, none compiled again for another batch of a known shape, whatever its captions.

    Nor for the blocks that keep their activations beside those that are recomputed.
    """
    plain = built(family.config)
    found = [_graphs(family, plain, stored) for stored in (None, 1)]
    assert len(set(found)) == 1, found


def _graphs(family: Family, plain: Model, stored: int | None) -> int:
    """Compile the blocks, of which all or some are recomputed, run them, and return the number of graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = built(family.config, recompute=stored is not None).store_blocks(stored or 0)
    model.compile_blocks(backend="aot_eager")
    graphs = []
    for turn in range(2):
        for size in SIZES:
            given = conditions(family.config)
            if turn and "context_mask" in given:
                given["context_mask"] = torch.ones_like(given["context_mask"])
            latents = noisy(family.config, size)
            out = model(latents, _SIGMA, **given)
            out.square().mean().backward()
            assert difference(out, plain(latents, _SIGMA, **given)) < 1e-5
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[1] == graphs[0]
    assert not torch._dynamo.utils.counters["graph_break"]
    return graphs[1]


@families
def test_weights_are_drawn_and_loaded_one_by_one(family: Family) -> None:
    expected = build_model(family.config, seed=5).state_dict()
    deferred = build_deferred(family.config, seed=5)
    found = dict(deferred.weights())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    parameters = {name for name, _ in deferred.network.named_parameters()}
    loaded = load_model(family.config, {name: value for name, value in found.items() if name in parameters})
    assert not [name for name, value in loaded.state_dict().items() if value.is_meta]
    given = conditions(family.config)
    first, second = (model(noisy(family.config), _SIGMA, **given) for model in (loaded, theirs_as_ours(family, found)))
    assert torch.equal(first, second)


def theirs_as_ours(family: Family, weights: dict[str, Tensor]) -> BlockwiseModel:
    """An adapter that was never on ``meta``, with these weights."""
    model = build_model(family.config)
    model.load_state_dict(weights)
    return model


@families
def test_the_configuration_is_that_of_the_file(family: Family) -> None:
    config = family.config
    file = {"_class_name": config.diffusers_class, "_diffusers_version": "0.42.1", **config.to_diffusers()}
    written = theirs(config, build_model(config).state_dict()).config
    entries = {name: value for name, value in written.items() if not name.startswith("_")}
    assert json.loads(json.dumps(entries)) == config.to_diffusers()
    read = type(config).from_diffusers(file)
    default = type(config)()
    assert read == config.completed(default) != config
    assert read.completed(config) == config
    assert read.completed(DiTConfig()) == read
    with pytest.raises(ConfigError, match=rf"config.json has strange 1, expected no such entry, for {config.title}"):
        type(config).from_diffusers({**file, "strange": 1})


@families
def test_another_convention_is_refused(family: Family) -> None:
    expected = family.config.flow_convention
    assert expected is not None
    RunConfig(model=family.config, objective=FlowConfig(convention=expected))
    others = (FlowConfig(convention="sit" if expected != "sit" else "repa"), DdpmConfig())
    for objective in others:
        with pytest.raises(ConfigError, match=f"set --objective.process flow --objective.convention {expected}"):
            RunConfig(model=family.config, objective=objective)


@families
def test_attention_takes_what_torch_has(family: Family) -> None:
    with pytest.raises(ConfigError, match=r"--performance.attention xformers: .* use auto, cudnn or flash"):
        build_model(family.config, attention="xformers")
    plain, other = built(family.config), built(family.config, attention="reference")
    given = conditions(family.config)
    for model, fused in ((plain, True), (other, False)):
        with Costs() as costs, torch.no_grad():
            model(noisy(family.config), _SIGMA, **given)
        assert any("flash_attention" in name for name in costs.operations) == fused
    assert difference(other(noisy(family.config), _SIGMA, **given), plain(noisy(family.config), _SIGMA, **given)) < 1e-5
    with pytest.raises(RuntimeError, match="attention backend 'flash': needs a CUDA device"):
        built(family.config, attention="flash")(noisy(family.config), _SIGMA, **given)


@pytest.mark.parametrize(
    ("config", "parameters", "share"),
    [
        (Flux2Config(), 3.876e9, 1),
        (_FLUX2_9B, 9.079e9, 1),
        (ZImageConfig(), 6.155e9, 1),
        (QwenImageConfig(), 20.430e9, 1 / 3),  # each of its streams, and the modulation, has a third of the weights
        (SD3Config(), 2.243e9, 0.4),
        (_SD35_LARGE, 8.057e9, 0.35),
    ],
    ids=["flux2-4b", "flux2-9b", "z-image", "qwen-image", "sd35-medium", "sd35-large"],
)
def test_published_sizes(config: DiffusersTransformerConfig, parameters: float, share: float) -> None:
    """Parameters as published; a token takes about one multiply-add per weight of its stream, and attention."""
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in build_model(config).parameters())
    assert count == pytest.approx(parameters, rel=2e-4)
    counted = family_of(config)
    total, of_inputs = counted.multiply_adds(config), counted.input_multiply_adds(config)
    assert 0 < of_inputs < 0.01 * total
    tokens = (config.size // config.smallest_factor) ** 2 + conditions_of(config)
    assert 0.75 < total / (share * parameters * tokens) < 1.6


def conditions_of(config: DiffusersTransformerConfig) -> int:
    """Return the tokens of a caption."""
    shape: Any = config.conditions["context"]
    return int(shape[0])
