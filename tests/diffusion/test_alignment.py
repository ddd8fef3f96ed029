"""Alignment with the features of a teacher (REPA): loss and gradients by the paper in float64, its end, refusals."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from fastdiff.batch import Batch, Condition, Outputs, split
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.pretrained import PretrainedConfig
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.objective import DdpmConfig, FlowConfig, ObjectiveConfig
from fastdiff.diffusion.objective import Objective
from fastdiff.errors import ConfigError
from fastdiff.models.cost.flops import forward_flops
from fastdiff.models.cost.traced import trace
from fastdiff.models.dit.network import DiT
from tests.support.references.dit_reference import trained

SEED, WIDTH, WEIGHT = 3, 5, 0.5
MODEL = DiTConfig(
    depth=3, hidden=16, heads=2, patch=2, size=6, channels=3, classes=4, aligned_width=WIDTH, aligned_block=2,
    aligned_hidden=24, rotary=True, value_residual=True,
)  # fmt: skip
WITH_TOKEN = replace(MODEL, teacher_width=WIDTH, aligned_token=True)
MODELS = {
    "patches": MODEL,
    "behind a class token of the teacher": replace(MODEL, teacher_width=7),
    "behind tokens of the class": replace(MODEL, in_context=2, in_context_from=1, value_residual=False),
    "in front of blocks that leave tokens out": replace(MODEL, routing="sprint", routing_from=2, routing_to=2),
    "with a class token of the teacher": replace(WITH_TOKEN, in_context=2, in_context_from=1, value_residual=False),
    "with one, as SR-DiT": replace(WITH_TOKEN, routing="sprint", routing_from=2, routing_to=2),
}
POSITION = torch.arange(8, 12)


def batch(config: DiTConfig) -> Batch:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(4, *shape, generator=generator)

    condition = {"label": torch.arange(4), "teacher_features": random(WIDTH, 3, 3)}
    if config.teacher_width:
        condition["teacher_token"] = random(config.teacher_width)
    return Batch(random(3, 6, 6), POSITION, condition)


def objective(config: DiTConfig, given: ObjectiveConfig, batch_samples: int = 4) -> Objective:
    return Objective(
        given, seed=SEED, null={"label": torch.tensor(4)}, device="cpu", inputs=config.conditions.keys(),
        batch_samples=batch_samples, aligned_token=config.aligned_token,
    )  # fmt: skip


def flow(config: DiTConfig, **options: Any) -> FlowConfig:
    token = {"teacher_weight": 0.2} if config.teacher_width else {}
    return FlowConfig(condition_dropout=0.0, **token, **options)


def exact_alignment(model: DiT, tokens: Tensor, condition: Condition) -> Tensor:
    """Minus the mean cosine of each sample, token by token: equation 8 of the paper, of SR-DiT with the class token."""
    weights = {name: value.double() for name, value in model.projectors.named_parameters()}  # type: ignore[union-attr]
    losses = []
    for number, sample in enumerate(tokens.double()):
        targets = [condition["teacher_features"][number, :, patch // 3, patch % 3] for patch in range(9)]
        if model.config.aligned_token:
            targets = [condition["teacher_token"][number], *targets]
        cosines = []
        for token, target in zip(sample[-len(targets) :], targets, strict=True):
            for layer in (0, 2, 4):
                token = weights[f"0.{layer}.weight"] @ token + weights[f"0.{layer}.bias"]
                token = token if layer == 4 else token / (1 + torch.exp(-token))
            wanted = target.double()
            cosines.append(token @ wanted / (token.norm() * wanted.norm()))
        losses.append(-torch.stack(cosines).mean())
    return torch.stack(losses)


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_paper(name: str) -> None:
    config = MODELS[name]
    model, given = trained(config).double(), batch(config)
    with_it, without = (objective(config, flow(config, **o)) for o in ({"alignment_weight": WEIGHT}, {}))
    corruption = with_it.add_noise(given, native=torch.tensor([0.1, 0.4, 0.6, 0.9]))
    seen: list[Tensor] = []
    handle = model.blocks[config.aligned_block - 1].register_forward_hook(lambda *call: seen.append(call[2]))
    output = model(corruption.noisy.double(), corruption.time, **corruption.condition)
    handle.remove()
    output = Outputs(*(None if part is None else part.float() for part in split(output)))  # type: ignore[arg-type]
    losses = with_it.loss(output, given, corruption)
    parts = dict(zip(with_it.part_names, with_it.parts, strict=True))
    aligned = WEIGHT * exact_alignment(model, seen[0], given.condition)
    torch.testing.assert_close(parts["loss_alignment"].double(), aligned.detach(), rtol=1e-5, atol=1e-7)
    plain = without.loss(output, given, corruption)
    torch.testing.assert_close(losses, plain + parts["loss_alignment"], rtol=1e-6, atol=1e-6)
    names = [name for name, _ in model.named_parameters()]
    ours = torch.autograd.grad(losses.sum(), list(model.parameters()), retain_graph=True, materialize_grads=True)
    exact = torch.autograd.grad(plain.double().sum() + aligned.sum(), list(model.parameters()), materialize_grads=True)
    for parameter, found, expected in zip(names, ours, exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()), msg=parameter)
    assert any(bool(g.any()) for n, g in zip(names, ours, strict=True) if n.startswith("projectors."))


def test_networks_in_evaluation_have_no_head_and_equal_outputs() -> None:
    model, given = trained(MODEL), batch(MODEL)
    time = torch.full((4,), 0.3)
    in_training = split(model(given.latents, time, given.condition["label"]))
    assert in_training.projected is not None
    plain = model.eval()(given.latents, time, given.condition["label"])
    assert isinstance(plain, Tensor)
    assert torch.equal(plain, in_training.latents)


@pytest.mark.parametrize("given", [FlowConfig(), DdpmConfig(prediction="v")], ids=lambda config: config.process)
def test_it_ends_after_its_steps(given: ObjectiveConfig) -> None:
    """Steps of 5 samples: those at positions 8 and 9 belong to step 1, 10 and 11 to step 2."""
    given = replace(given, alignment_weight=WEIGHT, alignment_steps=2)
    made, data = objective(MODEL, given, batch_samples=5), batch(MODEL)
    model = trained(MODEL)
    corruption = made.add_noise(data)
    losses = made.loss(model(corruption.noisy, corruption.time, **corruption.condition), data, corruption)
    aligned = dict(zip(made.part_names, made.parts, strict=True))["loss_alignment"]
    assert (aligned != 0).tolist() == [True, True, False, False]
    gradients = torch.autograd.grad(losses[2:].sum(), list(model.projectors.parameters()))  # type: ignore[union-attr]
    assert all(bool((gradient == 0).all()) for gradient in gradients)


def test_there_is_one_graph_per_block_and_none_breaks() -> None:
    model, given = trained(MODEL), batch(MODEL)
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model.compile_blocks(backend=counter)
    for _ in range(2):
        output = split(model(given.latents, torch.full((4,), 0.3), given.condition["label"]))
        assert output.projected is not None
        (output.latents.sum() + output.projected.sum()).backward()
    assert not torch._dynamo.utils.counters["graph_break"]
    assert counter.frame_count <= 2, "the first block also gives its values"


@pytest.mark.parametrize(("config", "tokens"), [(MODEL, 9), (WITH_TOKEN, 10)])
def test_the_head_counts_as_operations(config: DiTConfig, tokens: int) -> None:
    plain = replace(config, aligned_width=0, aligned_token=False)
    head = 2 * tokens * (16 * 24 + 24 * 24 + 24 * WIDTH)
    assert forward_flops(config) - forward_flops(plain) == head


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_runs_the_head_without_data(name: str) -> None:
    """With or without a class token beside it."""
    model = MODELS[name]
    config = RunConfig(samples=256, model=model, objective=flow(model, alignment_weight=WEIGHT))
    data, cpu = batch(model), torch.device("cpu")
    condition = {name: value for name, value in data.condition.items() if name in ("label", "teacher_token")}
    found = trace(config, data.latents, condition, cpu)
    plain = replace(config, model=replace(model, aligned_width=0, aligned_token=False), objective=flow(model))
    assert found.matmul > trace(plain, data.latents, condition, cpu).matmul


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        (MODEL, FlowConfig(), "--objective.alignment_weight 0 and --model.aligned_width 5 belong together"),
        (
            replace(MODEL, aligned_width=0), FlowConfig(alignment_weight=0.5),
            "--objective.alignment_weight 0.5 and --model.aligned_width 0 belong together",
        ),
        (UNetConfig(), FlowConfig(alignment_weight=0.5), "belong together"),
    ],
)  # fmt: skip
def test_weight_and_head_belong_together(model: Any, given: ObjectiveConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig(samples=8, model=model, objective=given)


def test_options_that_contradict_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--model.aligned_block 4: the network has 3 blocks"):
        replace(MODEL, aligned_block=4)
    with pytest.raises(ConfigError, match=r"--model.aligned_block 2, counted from 1, is among the blocks that leave"):
        replace(MODEL, routing="tread", routing_from=1, routing_to=1)
    with pytest.raises(ConfigError, match=r"--model.aligned_width 5 with --model.base_width 8: how the gradient"):
        replace(MODEL, base_width=8)
    for width in (0, 7):
        with pytest.raises(ConfigError, match=rf"--model.aligned_token with --model.teacher_width {width} and"):
            replace(MODEL, teacher_width=width, aligned_token=True)
    with pytest.raises(ConfigError, match=r"--model.aligned_width 5 with --pretrained.weights: .* have no head"):
        RunConfig(
            samples=8, model=MODEL, objective=FlowConfig(alignment_weight=WEIGHT),
            pretrained=PretrainedConfig(path="dit.safetensors", weights=True),
        )  # fmt: skip
    with pytest.raises(ConfigError, match=r"--objective.alignment_steps 5 without --objective.alignment_weight"):
        FlowConfig(alignment_steps=5)
    with pytest.raises(ConfigError, match=r"--objective.alignment_weight nan"):
        FlowConfig(alignment_weight=math.nan)


def test_features_of_another_grid_are_an_error() -> None:
    made, data = objective(MODEL, FlowConfig(alignment_weight=WEIGHT)), batch(MODEL)
    corruption = made.add_noise(data)
    output = trained(MODEL)(corruption.noisy, corruption.time, **corruption.condition)
    wrong = F.interpolate(data.condition["teacher_features"], size=(2, 2))
    with pytest.raises(ValueError, match=r"the teacher's \(4, 4, 5\); check --model.aligned_width"):
        made.loss(output, replace(data, condition={**data.condition, "teacher_features": wrong}), corruption)
