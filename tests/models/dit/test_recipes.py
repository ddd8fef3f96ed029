"""Options of the DiT: the published recipes against their equations in float64, names, initial weights, refusals."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.pretrained import PretrainedConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import as_json
from fastdiff.config.sections.objective import DdpmConfig, FlowConfig, ObjectiveConfig
from fastdiff.config.sections.output import OutputConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.errors import ConfigError
from fastdiff.export.formats import format_of, formats_of
from fastdiff.models.build import build_deferred, build_model
from fastdiff.models.cost.flops import forward_flops, training_flops
from fastdiff.models.dit.network import DiT
from fastdiff.models.dit.rotary import rotary_table
from fastdiff.models.embeddings import position_table
from fastdiff.models.fp8 import inner_blocks
from fastdiff.models.load import build_network
from fastdiff_kernels import dispatch
from tests.support.nights import by_day
from tests.support.references.dit_reference import trained
from tests.support.references.recipes_reference import Shape, jit, lightning, rit, single, speedrun

PLAIN = DiTConfig(depth=2, hidden=24, heads=2, patch=2, size=6, channels=3, classes=5)


@dataclass(frozen=True)
class Recipe:
    config: DiTConfig
    rendering: Callable[..., Tensor | tuple[Tensor, Tensor]]

    @property
    def shape(self) -> Shape:
        config = self.config
        return Shape(
            depth=config.depth, heads=config.heads, patch=config.patch, side=config.side,
            in_context=config.in_context, in_context_from=config.in_context_from, norm_eps=config.norm_eps,
            qk_norm_eps=config.qk_norm_eps,
        )  # fmt: skip


RECIPES = {
    "lightning": Recipe(replace(PLAIN, norm="rms-weight", mlp="swiglu", rotary=True), lightning),
    "speedrun": Recipe(
        replace(PLAIN, depth=3, norm="rms", rotary=True, qk_norm=True, qk_norm_eps=2**-23, value_residual=True),
        speedrun,
    ),
    "jit": Recipe(
        replace(
            PLAIN, norm="rms-weight", mlp="swiglu", rotary=True, qk_norm=True, in_context=3, in_context_from=1,
            patch_bottleneck=7, head_dim=8, norm_eps=0.02, qk_norm_eps=0.05,  # so large that they show
        ),
        jit,
    ),
    "rit": Recipe(
        replace(
            PLAIN, depth=3, norm="rms-weight", mlp="swiglu", rotary=True, qk_norm=True, in_context=3, in_context_from=1,
            teacher_width=10,
        ),
        rit,
    ),
    "speedrun-token": Recipe(
        replace(
            PLAIN, depth=3, norm="rms", rotary=True, qk_norm=True, qk_norm_eps=2**-23, value_residual=True,
            teacher_width=10, teacher_norm=True, teacher_zero=True,
        ),
        speedrun,
    ),
    "single": Recipe(replace(PLAIN, modulation="adaln-single"), single),
}  # fmt: skip


def inputs(config: DiTConfig) -> tuple[tuple[Tensor, ...], Tensor]:
    """Noisy latents, times, classes, noisy class tokens of a teacher if the network has them; and a target."""
    generator = torch.Generator().manual_seed(1)
    noisy, target = torch.randn(2, 3, config.channels, config.size, config.size, generator=generator)
    given, target = (noisy, torch.tensor([0.0, 0.3, 0.9]), torch.tensor([0, config.classes, 2])), target.flatten(1)
    if not config.teacher_width:
        return given, target
    token, of_token = torch.randn(2, 3, config.teacher_width, generator=generator)
    return (*given, token), torch.cat([target, of_token], dim=1)


def whole(output: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """The prediction of the latents, and of the token behind it."""
    if isinstance(output, Tensor):
        return output.flatten(1)
    return torch.cat([part.flatten(1) for part in output if part is not None], dim=1)


@dataclass
class Pass:
    output: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def run(model: DiT) -> Pass:
    given, target = inputs(model.config)
    output = whole(model(*given))
    loss = (output - target).square().mean()
    model.zero_grad()
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Pass(output.detach(), loss.detach(), found)


def render(recipe: Recipe, **traps: bool) -> Pass:
    """The same in float64 by the equations."""
    weights = {name: p.detach().double().requires_grad_() for name, p in trained(recipe.config).named_parameters()}
    (noisy, time, label, *token), target = inputs(recipe.config)
    rows = zip(noisy.double(), time.tolist(), label.tolist(), *(value.double() for value in token), strict=True)
    rendered = [recipe.rendering(weights, replace(recipe.shape, **traps), *row) for row in rows]
    output = torch.cat([whole(_batch_of_one(one)) for one in rendered])
    loss = (output - target.double()).square().mean()
    loss.backward()
    found = {name: value.grad for name, value in weights.items() if value.grad is not None}
    assert found.keys() == weights.keys()
    return Pass(output.detach(), loss.detach(), found)


def objective_of(config: DiTConfig) -> ObjectiveConfig:
    return FlowConfig(teacher_weight=0.2) if config.teacher_width else DdpmConfig()


def _batch_of_one(output: Tensor | tuple[Tensor, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
    return output[None] if isinstance(output, Tensor) else (output[0][None], output[1][None])


def close(ours: Tensor, exact: Tensor, name: str) -> None:
    error = (ours.double() - exact).abs().max() / exact.abs().max()
    assert error < 1e-5, f"{name}: {error:.1e}"


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("way", by_day(["reference", "triton"], "compiled", "recomputed"))
def test_output_loss_and_every_gradient_are_those_of_the_recipe(name: str, way: str) -> None:
    recipe = RECIPES[name]
    exact, model = render(recipe), trained(recipe.config, recompute=way == "recomputed")
    if way == "compiled":
        torch._dynamo.reset()
        model.compile_blocks(backend="aot_eager")
    with dispatch.forced(adaln="reference" if way == "reference" else "triton"):
        ours = run(model)
    close(ours.output, exact.output, "output")
    close(ours.loss, exact.loss, "loss")
    assert ours.gradients.keys() == exact.gradients.keys()
    largest = {name: gradient.abs().max() for name, gradient in exact.gradients.items()}
    for weight, gradient in exact.gradients.items():
        if largest[weight] > 1e-9:  # keys' biases: the softmax does not depend on them
            close(ours.gradients[weight], gradient, weight)


@pytest.mark.parametrize(
    ("name", "trap"),
    [
        ("lightning", "half_split"),
        ("lightning", "columns_first"),
        ("lightning", "halves_swapped"),
        ("speedrun", "turned_first"),
    ],
)
def test_the_usual_errors_would_show(name: str, trap: str) -> None:
    """Pairs half a head apart, rows and columns exchanged, the gate in the other half, the norm behind the rotation."""
    recipe = RECIPES[name]
    right, wrong = render(recipe).output, render(recipe, **{trap: True}).output
    assert (right - wrong).abs().max() > 1e-3 * right.abs().max()


def test_a_patch_turns_the_first_half_of_a_head_by_its_row() -> None:
    cos, sin = rotary_table(3, 8, extra=2, dtype=torch.float64)
    row, column = torch.tensor([0.0] * 2 + [0, 0, 0, 1, 1, 1, 2, 2, 2]), torch.tensor([0.0] * 2 + [0, 1, 2] * 3)
    angles = torch.stack([row, row / 100, column, column / 100], 1).double()
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())


LIGHTNING_NAMES = {
    "pos_embed": (1, 9, 24),
    "feat_rope.freqs_cos": (9, 12),
    "feat_rope.freqs_sin": (9, 12),
    "x_embedder.proj.weight": (24, 3, 2, 2),
    "x_embedder.proj.bias": (24,),
    "t_embedder.mlp.0.weight": (24, 256),
    "t_embedder.mlp.0.bias": (24,),
    "t_embedder.mlp.2.weight": (24, 24),
    "t_embedder.mlp.2.bias": (24,),
    "y_embedder.embedding_table.weight": (6, 24),
    "final_layer.norm_final.weight": (24,),
    "final_layer.linear.weight": (12, 24),
    "final_layer.linear.bias": (12,),
    "final_layer.adaLN_modulation.1.weight": (48, 24),
    "final_layer.adaLN_modulation.1.bias": (48,),
}
LIGHTNING_BLOCK = {
    "norm1.weight": (24,),
    "norm2.weight": (24,),
    "attn.qkv.weight": (72, 24),
    "attn.qkv.bias": (72,),
    "attn.proj.weight": (24, 24),
    "attn.proj.bias": (24,),
    "mlp.w12.weight": (128, 24),
    "mlp.w12.bias": (128,),
    "mlp.w3.weight": (24, 64),
    "mlp.w3.bias": (24,),
    "adaLN_modulation.1.weight": (144, 24),
    "adaLN_modulation.1.bias": (144,),
}


def lightning_file(path: Path) -> dict[str, Tensor]:
    """Write a file with the names and tables of a published LightningDiT."""
    shapes = LIGHTNING_NAMES | {f"blocks.{n}.{name}": shape for n in (0, 1) for name, shape in LIGHTNING_BLOCK.items()}
    generator = torch.Generator().manual_seed(3)
    state = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    state["pos_embed"] = position_table(24, 3)
    places = [(row, column) for row in range(3) for column in range(3)]
    angles = [[place / 10000 ** (i / 3) for place in both for i in range(3) for _ in "xy"] for both in places]
    state["feat_rope.freqs_cos"], state["feat_rope.freqs_sin"] = torch.tensor(angles).cos(), torch.tensor(angles).sin()
    save_file(state, path)
    return state


def started(path: Path, config: DiTConfig) -> dict[str, Tensor]:
    start = PretrainedConfig(path=str(path), weights=True)
    run = RunConfig(model=config, objective=objective_of(config), pretrained=start, output=OutputConfig(sample_every=0))
    return build_network(run).state_dict()


def test_a_published_lightning_dit_loads_and_other_angles_are_refused(tmp_path: Path) -> None:
    config, path = RECIPES["lightning"].config, tmp_path / "model.safetensors"
    state = lightning_file(path)
    found = started(path, config)
    assert found.keys() == {name for name in state if not name.startswith("feat_rope")}
    assert all(torch.equal(found[name], state[name]) for name in found)
    with pytest.raises(ConfigError, match=r"belong to another network: .*feat_rope\.freqs_cos"):
        started(path, replace(config, rotary=False, positions="sincos"))
    table = state["feat_rope.freqs_cos"]
    for other in (table.roll(6, 1), torch.cat([table[:, ::2]] * 2, 1), table[:8].clone(), table * torch.nan):
        save_file({**state, "feat_rope.freqs_cos": other.contiguous()}, path)
        with pytest.raises(ConfigError, match=r"feat_rope\.freqs_cos, of shape \(\d, 12\), is not that of neigh"):
            started(path, config)


def test_the_tables_of_rit_begin_with_the_class_token(tmp_path: Path) -> None:
    """Its row of the position table is zero, and those of class tokens do not turn."""
    config, path = RECIPES["rit"].config, tmp_path / "model.safetensors"
    state = trained(config).state_dict()
    rows = state["pos_embed"]
    assert torch.equal(rows, torch.cat([torch.zeros(1, 1, 24), position_table(24, 3)], dim=1))
    cos, sin = (table.repeat_interleave(2, dim=1) for table in rotary_table(3, 12, extra=1))
    tables = {"feat_rope.freqs_cos": cos, "feat_rope.freqs_sin": sin}
    save_file(state | tables, path)
    found = started(path, config)
    assert all(torch.equal(found[name], value) for name, value in state.items())
    for wrong in (rows.flip(1), torch.zeros(1, 10, 24)):
        save_file(state | tables | {"pos_embed": wrong.contiguous()}, path)
        with pytest.raises(ConfigError, match=r"its pos_embed, of shape \(1, 10, 24\), is not the fixed sine-cosine"):
            started(path, config)


def test_fresh_weights_have_the_published_scales() -> None:
    """Constants of norms, shares and zeros; class tokens of 0.02; tables of adaLN-single of 1 / sqrt(D)."""
    wide = {"hidden": 384, "heads": 6, "size": 8}
    last = "final_layer.linear.weight"
    zero = {False: (last,), True: (last, "final_layer.linear_cls.weight")}
    for recipe in RECIPES.values():
        config = replace(recipe.config, **wide, **({"head_dim": 0} if recipe.config.head_dim else {}))
        for name, parameter in build_model(config).named_parameters():
            value = parameter.detach()
            if "norm" in name:
                assert torch.equal(value, torch.ones_like(value)), name
            elif "lambda" in name:
                assert value == 0.5
            elif "scale_shift_table" in name:
                assert value.std() == pytest.approx(384**-0.5, rel=0.05), name
            elif name.endswith("bias") or "adaLN" in name or name in zero[config.teacher_zero]:
                assert torch.count_nonzero(value) == 0, name
            elif name.startswith(("t_embedder", "y_embedder", "in_context", "t_block")):
                assert value.std() == pytest.approx(0.02, rel=0.05), name
            else:
                bound = math.sqrt(6 / sum(value.flatten(1).shape))
                assert bound * 0.97 < value.abs().max() <= bound, name


@pytest.mark.parametrize("name", RECIPES)
def test_parameters_and_operations_are_those_of_the_built_network(name: str) -> None:
    config = replace(RECIPES[name].config, learn_sigma=True, mlp_ratio=3.3)
    with torch.device("meta"):
        model = build_model(config, attention="reference")
        given = torch.empty(2, 3, 6, 6), torch.zeros(2), torch.zeros(2, dtype=torch.int64)
        token = (torch.empty(2, config.teacher_width),) if config.teacher_width else ()
        with FlopCounterMode(display=False) as both:
            with FlopCounterMode(display=False) as forward:
                prediction = whole(model(*given, *token))
            prediction.sum().backward()
    assert forward_flops(config) == forward.get_total_flops() / 2
    assert training_flops(config) == both.get_total_flops() / 2


@pytest.mark.parametrize("name", RECIPES)
def test_weights_drawn_one_by_one_are_those_of_the_constructor(name: str) -> None:
    config = RECIPES[name].config
    drawn, built = dict(build_deferred(config, seed=4).weights()), build_model(config, seed=4).state_dict()
    assert drawn.keys() == built.keys()
    assert all(torch.equal(drawn[name], value) for name, value in built.items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"head_dim": 6, "rotary": True}, "--model.rotary rotates .* heads have 6 channels, expected a multiple of 4"),
        ({"positions": "none"}, "--model.positions none without --model.rotary: nothing would tell"),
        ({"in_context_from": 1}, "--model.in_context_from 1: there are no class tokens"),
        ({"in_context": 3, "in_context_from": 2}, "--model.in_context_from 2: there are 2 blocks, expected less"),
        (
            {"in_context": 3, "in_context_from": 1, "value_residual": True},
            "--model.value_residual with --model.in_context_from 1: block 0 has no values of the class tokens",
        ),
        ({"in_context": -1}, "--model.in_context -1: at least 0"),
        ({"norm_eps": 0.0}, "--model.norm_eps 0.0: a number between 0 and 1"),
        ({"teacher_width": -1}, "--model.teacher_width -1: at least 0"),
        ({"teacher_norm": True}, "--model.teacher_norm without --model.teacher_width: there is no token"),
        ({"teacher_zero": True}, "--model.teacher_zero without --model.teacher_width: there is no token"),
        ({"mlp": "swiglu", "mlp_ratio": 0.05}, "--model.mlp_ratio 0.05: a number above 0"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(PLAIN, **options)


def test_what_has_the_published_network_alone_refuses_the_options_in_words() -> None:
    config = replace(PLAIN, norm="rms", rotary=True)
    named = r"--model.norm rms --model.rotary"
    assert list(formats_of(config)) == ["lora", "safetensors"]
    for name in ("diffusers", "dit", "dit-training"):
        with pytest.raises(
            ConfigError, match=f"--format {name}: its network lacks {named} of the run; use safetensors"
        ):
            format_of(config, name)
    with pytest.raises(ConfigError, match=f"--performance.fp8: .* this network has {named}; leave the flag out"):
        inner_blocks(build_model(config), PerformanceConfig(fp8=True))


@pytest.mark.parametrize("name", RECIPES)
def test_the_record_of_a_run_has_every_option_as_it_is(name: str) -> None:
    """None of their names looks like that of a secret."""
    config = RECIPES[name].config
    assert as_json(RunConfig(model=config, objective=objective_of(config)))["model"] == asdict(config)


@pytest.mark.parametrize("adaln", ["reference", "triton"])
def test_a_share_of_zero_leaves_the_values_as_they_are(adaln: Any) -> None:
    """Also without a rotation, where the values come from another op."""
    plain, mixing = trained(PLAIN), trained(replace(PLAIN, value_residual=True))
    shares = {name: torch.zeros(1) for name, _ in mixing.named_parameters() if name.endswith("v1_lambda")}
    mixing.load_state_dict({**plain.state_dict(), **shares})
    with dispatch.forced(adaln=adaln):
        expected, found = run(plain), run(mixing)
    assert shares.keys() == found.gradients.keys() - expected.gradients.keys() == {"blocks.1.attn.v1_lambda"}
    for name, gradient in expected.gradients.items():
        close(found.gradients[name], gradient.double(), name)


def test_a_head_dim_that_is_that_of_the_width_is_no_option() -> None:
    assert replace(PLAIN, head_dim=12).options == ""
    assert replace(PLAIN, head_dim=8).options == "--model.head_dim 8"
