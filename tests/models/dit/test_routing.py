"""Token dropping of a DiT: loss and gradients by the papers in float64, graphs, operations, draws, refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from fastdiff.batch import Batch
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.config.sections.objective import DdpmConfig, FlowConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.diffusion.objective import Objective
from fastdiff.diffusion.routing import TokenRouting
from fastdiff.errors import ConfigError
from fastdiff.export.formats import formats_of
from fastdiff.models.build import build_deferred, build_model
from fastdiff.models.cost.dry_network import dry_inputs
from fastdiff.models.cost.flops import forward_flops, run_flops, training_flops
from fastdiff.models.dit.network import DiT
from fastdiff.models.fp8 import inner_blocks
from fastdiff.planning.network import read_network
from fastdiff_kernels import dispatch
from tests.support.nights import by_day
from tests.support.references.dit_reference import trained
from tests.support.references.recipes_reference import Shape, speedrun

BASE = DiTConfig(
    depth=4, hidden=24, heads=2, patch=2, size=6, channels=3, classes=5, norm="rms", rotary=True, qk_norm=True,
    qk_norm_eps=2**-23, value_residual=True, teacher_width=10, teacher_norm=True,
)  # fmt: skip
MIDDLE = {"routing_from": 1, "routing_to": 2}
CONFIGS = {
    "tread": replace(BASE, routing="tread", **MIDDLE),
    "sprint": replace(BASE, routing="sprint", routing_share=0.6, **MIDDLE),
    "tread without tokens and values": replace(
        BASE, routing="tread", routing_share=0.5, routing_from=0, routing_to=2, value_residual=False,
        teacher_width=0, teacher_norm=False,
    ),
}  # fmt: skip
CPU = torch.device("cpu")
PLAIN = DiTConfig(depth=4, hidden=24, heads=2, patch=2, size=6, channels=3, classes=5)


def given(config: DiTConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    route = config.route
    assert route is not None
    found = {
        "noisy": torch.randn(3, config.channels, config.size, config.size, generator=generator),
        "time": torch.tensor([0.0, 0.3, 0.9]),
        "label": torch.tensor([0, config.classes, 2]),
        "token_scores": torch.rand(3, route.tokens, generator=generator),
    }
    if config.teacher_width:
        found["teacher_token"] = torch.randn(3, config.teacher_width, generator=generator)
    if config.has_sparse_path:
        found["sparse_path"] = torch.tensor([True, False, True])
    return found


def whole(output: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    parts = [output] if isinstance(output, Tensor) else [part for part in output if part is not None]
    return torch.cat([part.flatten(1) for part in parts], dim=1)


def run(model: DiT, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss against zeros, weighted by sample, and the gradients."""
    output = whole(model(**inputs))
    loss = (output.square().mean(dim=1) * torch.tensor([1.0, 0.5, 2.0])).sum()
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def render(config: DiTConfig, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The same in float64 by the equations; the kept tokens are sorted by hand."""
    weights = {name: p.detach().double().requires_grad_() for name, p in trained(config).named_parameters()}
    route, loss = config.route, torch.zeros((), dtype=torch.float64)
    assert route is not None
    shape = Shape(
        depth=config.depth, heads=config.heads, patch=config.patch, side=config.side, routing=config.routing,
        routed=route.blocks,
    )  # fmt: skip
    for row, weight in enumerate((1.0, 0.5, 2.0)):
        scores = inputs["token_scores"][row].tolist() if "token_scores" in inputs else [0.0] * route.tokens
        ranked = sorted(range(route.tokens), key=lambda i: scores[i])
        output = speedrun(
            weights, shape, inputs["noisy"][row].double(), float(inputs["time"][row]), int(inputs["label"][row]),
            inputs["teacher_token"][row].double() if "teacher_token" in inputs else None,
            ranked[: route.kept] if "token_scores" in inputs else ranked,
            bool(inputs["sparse_path"][row]) if "sparse_path" in inputs else True,
        )  # fmt: skip
        parts = (output,) if isinstance(output, Tensor) else output
        loss = loss + weight * torch.cat([part.flatten() for part in parts]).square().mean()
    loss.backward()
    return loss.detach(), {name: value.grad for name, value in weights.items() if value.grad is not None}


def close(ours: Tensor, exact: Tensor, name: str) -> None:
    error = (ours.double() - exact).abs().max() / exact.abs().max()
    assert error < 1e-5, f"{name}: {error:.1e}"


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("way", by_day(["reference", "triton"], "compiled"))
def test_loss_and_every_gradient_are_those_of_the_paper(name: str, way: str) -> None:
    config = CONFIGS[name]
    inputs, model = given(config), trained(config)
    exact, gradients = render(config, inputs)
    if way == "compiled":
        torch._dynamo.reset()
        model.compile_blocks(backend="aot_eager")
    with dispatch.forced(adaln="reference" if way == "reference" else "triton"):
        loss, ours = run(model, inputs)
    close(loss, exact, "loss")
    assert ours.keys() == gradients.keys() == {name for name, _ in model.named_parameters()}
    for weight, gradient in gradients.items():
        if gradient.abs().max() > 1e-9:  # keys' biases: the softmax does not depend on them
            close(ours[weight], gradient, weight)


@pytest.mark.parametrize("name", CONFIGS)
def test_without_scores_all_tokens_pass(name: str) -> None:
    """As in evaluation and sampling."""
    config = CONFIGS[name]
    inputs = {key: value for key, value in given(config).items() if key not in ("token_scores", "sparse_path")}
    loss, _ = run(trained(config), inputs)
    close(loss, render(config, inputs)[0], "loss")
    if config.routing == "tread":  # and are those of the network without it
        plain = replace(config, routing="none", routing_from=2, routing_to=None, routing_share=None)
        assert torch.equal(loss, run(trained(plain), inputs)[0])


def test_recomputed_blocks_get_the_same_tokens() -> None:
    for config in CONFIGS.values():
        plain, again = (run(trained(config, recompute=recompute), given(config)) for recompute in (False, True))
        assert torch.equal(plain[0], again[0])
        assert all(torch.equal(gradient, again[1][name]) for name, gradient in plain[1].items())


def test_without_a_path_every_parameter_has_a_gradient() -> None:
    """That of the blocks without effect is zero, not missing: optimizers and engines treat all steps alike."""
    config = CONFIGS["sprint"]
    inputs = {**given(config), "sparse_path": torch.zeros(3, dtype=torch.bool)}
    for kept in (inputs, {name: value for name, value in inputs.items() if name != "token_scores"}):
        _, gradients = run(trained(config), kept)
        model = trained(config)
        assert gradients.keys() == {name for name, _ in model.named_parameters()}
        of_routed = {name: g for name, g in gradients.items() if name.startswith(("blocks.1.", "blocks.2."))}
        assert of_routed
        assert not any(torch.count_nonzero(gradient) for gradient in of_routed.values())
        assert torch.count_nonzero(gradients["mask_token"])


@pytest.mark.parametrize("kind", ["tread", "sprint"])
def test_a_training_that_ends_with_all_tokens_has_two_graphs(kind: Any) -> None:
    """Without a break: the blocks are compiled as whole graphs."""
    torch._dynamo.reset()
    config = replace(PLAIN, routing=kind, **MIDDLE)
    model, counter = trained(config), CompileCounterWithBackend("aot_eager")
    model.compile_blocks(backend=counter)
    inputs = given(config)
    whole_inputs = {name: value for name, value in inputs.items() if name != "token_scores"}
    for step in range(4):
        moved = {**inputs, "token_scores": inputs["token_scores"].roll(step, 1)}
        run(model, moved)
    for _ in range(2):
        run(model, whole_inputs)
    assert counter.frame_count == 2
    given_to = [
        node.meta["example_value"] for graph in counter.graphs for node in graph.graph.find_nodes(op="placeholder")
    ]
    assert all(isinstance(value, Tensor) for value in given_to), "a number of tokens is a symbol"


@pytest.mark.parametrize("name", CONFIGS)
def test_operations_are_those_of_the_built_network(name: str) -> None:
    config = replace(CONFIGS[name], learn_sigma=True, mlp_ratio=3.3)
    counts = {}
    with torch.device("meta"):
        model = build_model(config, attention="reference")
        inputs = {key: torch.empty_like(value, device="meta") for key, value in given(config).items()}
        for kept in (True, False):
            chosen = {key: value for key, value in inputs.items() if kept or key != "token_scores"}
            with FlopCounterMode(display=False) as both:
                with FlopCounterMode(display=False) as forward:
                    prediction = whole(model(**chosen))
                prediction.sum().backward()
            counts[kept] = forward.get_total_flops() / 3, both.get_total_flops() / 3
    assert forward_flops(config) == counts[False][0]
    assert training_flops(config) == counts[True][1]
    assert training_flops(config, dense=1.0) == counts[False][1]
    run_config = RunConfig(
        model=replace(config, dense_share=0.25, learn_sigma=False), samples=800, batch=BatchConfig(samples=100),
        objective=FlowConfig(teacher_weight=0.1 if config.teacher_width else 0.0),
    )  # fmt: skip
    assert run_config.dense_from == 600
    parts = [training_flops(run_config.model, dense=dense) for dense in (0.0, 1.0)]
    assert run_flops(run_config) == pytest.approx(0.75 * parts[0] + 0.25 * parts[1], rel=1e-12)


@pytest.mark.parametrize("kind", ["tread", "sprint"])
def test_a_plan_counts_both_parts(kind: Any) -> None:
    """Time by the mean of all steps, memory by the part with all tokens."""
    config = RunConfig(
        model=replace(PLAIN, routing=kind, dense_share=0.25, **MIDDLE), samples=800, batch=BatchConfig(samples=100)
    )
    never = replace(config, model=replace(config.model, dense_share=0.0))
    noisy, condition = dry_inputs(config.model, config.model.conditions, 2)
    with_all = noisy, {name: value for name, value in condition.items() if name != "token_scores"}
    networks = read_network(config, CPU), read_network(never, CPU), read_network(never, CPU, with_all)
    whole, sparse, dense = (network.traced(config.performance) for network in networks)
    for name in ("matmul", "short_attention", "bytes", "saved"):
        few, many = getattr(sparse, name), getattr(dense, name)
        assert few < many
        assert getattr(whole, name) == pytest.approx(0.75 * few + 0.25 * many, rel=1e-12), name
    assert whole.peak(8) == dense.peak(8) > sparse.peak(8)


def test_operations_by_hand() -> None:
    """TREAD on DiT-B/2 as published: half of 256 tokens skip 7 of 12 blocks of width 768."""
    config = DiTConfig(depth=12, hidden=768, heads=12, routing="tread", routing_from=2)
    route = config.route
    assert route is not None
    assert (route.tokens, route.kept, list(route.blocks)) == (256, 128, [2, 3, 4, 5, 6, 7, 8])

    def block(tokens: int) -> int:
        return tokens * (12 * 768**2 + 2 * tokens * 768)

    saved = forward_flops(config) - (training_flops(config) + training_flops_of_inputs(config)) / 3
    assert saved == 2 * 7 * (block(256) - block(128))


def training_flops_of_inputs(config: DiTConfig) -> float:
    """What a backward pass does not cost: gradients of latents and of time features."""
    return 2.0 * (256 * 16 * 768 + 256 * 768)


def test_numbers_of_kept_tokens_are_rounded_as_published() -> None:
    token = {"teacher_width": 10, "depth": 12, "hidden": 768, "heads": 12, "patch": 1, "size": 16}
    sprint = DiTConfig(routing="sprint", **token).route
    tread = DiTConfig(routing="tread", **token).route
    assert sprint is not None
    assert tread is not None
    assert (sprint.tokens, sprint.kept, list(sprint.blocks)) == (257, 64, list(range(2, 10)))
    assert (tread.tokens, tread.kept) == (257, 129)


def drawn(position: Tensor, *, dense: bool = False, **changes: Any) -> dict[str, Tensor]:
    route = replace(PLAIN, routing="sprint", path_drop=0.5, **MIDDLE, **changes).route
    assert route is not None
    routing = TokenRouting(route, seed=7, batch_samples=12, dense_from=1200)
    routing.begin_step(1200 if dense else 1188)
    objective = Objective(DdpmConfig(), seed=7, null={}, device="cpu", routing=routing)
    return objective.add_noise(Batch(torch.zeros(len(position), 3, 6, 6), position, {})).condition


@pytest.mark.parametrize(("ranks", "micro"), [(1, 12), (2, 3), (3, 2), (3, 4)])
def test_the_draws_do_not_know_ranks_or_micro_batches(ranks: int, micro: int) -> None:
    """Every sample draws its own tokens, a step one fate for all of its samples."""
    positions = torch.arange(12 * 40)
    expected = drawn(positions)
    parts = [drawn(part) for part in positions.view(-1, ranks, micro).transpose(0, 1).reshape(-1, micro)]
    order = positions.view(-1, ranks, micro).transpose(0, 1).reshape(-1)
    for name in ("token_scores", "sparse_path"):
        assert torch.equal(torch.cat([part[name] for part in parts]), expected[name][order])
    fates = expected["sparse_path"].view(40, 12)
    assert torch.equal(fates, fates[:, :1].expand(-1, 12))
    assert 8 < int(fates[:, 0].sum()) < 32
    ranks_of_tokens = expected["token_scores"].argsort(dim=1)
    assert len(ranks_of_tokens.unique(dim=0)) > 470


def test_the_dense_part_draws_no_tokens_but_still_loses_paths() -> None:
    positions = torch.arange(24)
    assert drawn(positions, dense=True).keys() == {"sparse_path"}
    assert torch.equal(drawn(positions, dense=True)["sparse_path"], drawn(positions)["sparse_path"])


def test_fresh_weights() -> None:
    """A mask token of zeros; a layer that joins as any other. Drawn one by one they are the same."""
    config = CONFIGS["sprint"]
    built, one_by_one = build_model(config, seed=4).state_dict(), dict(build_deferred(config, seed=4).weights())
    assert all(torch.equal(one_by_one[name], value) for name, value in built.items())
    assert torch.equal(built["mask_token"], torch.zeros(1, 1, 24))
    bound = (6 / 72) ** 0.5
    assert bound * 0.97 < built["fusion_proj.weight"].abs().max() <= bound
    assert torch.count_nonzero(built["fusion_proj.bias"]) == 0


def test_formats_and_fp8() -> None:
    """TREAD trains the weights of the published network; SPRINT has more of them."""
    tread, sprint = (replace(PLAIN, routing=kind, routing_to=2) for kind in ("tread", "sprint"))
    assert list(formats_of(tread)) == list(formats_of(PLAIN))
    assert list(formats_of(sprint)) == ["lora", "safetensors"]
    with pytest.raises(ConfigError, match=r"blocks in FP8 take all tokens, this network has --model.routing tread"):
        inner_blocks(build_model(tread), PerformanceConfig(fp8=True))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path_drop": 0.1}, "--model.path_drop 0.1 without --model.routing: no token is left out"),
        ({"dense_share": 0.1}, "--model.dense_share 0.1 without --model.routing"),
        ({"routing": "tread"}, r"leaves tokens out of blocks 2 to 0, the network has 0 to 3: set --model.routing_f"),
        ({"routing": "sprint", "routing_to": 4}, "leaves tokens out of blocks 2 to 4, the network has 0 to 3"),
        ({"routing": "tread", "routing_to": 2, "path_drop": 0.1}, "tread has no path that can be lost"),
        ({"routing": "sprint", "routing_to": 2, "path_drop": 1.0}, "--model.path_drop 1.0: from 0 to below 1"),
        ({"routing": "sprint", "routing_to": 2, "dense_share": 1.0}, "--model.dense_share 1.0: from 0 to below"),
        ({"routing": "tread", "routing_to": 2, "routing_share": 1.0}, "routing_share 1.0: above 0 and be"),
        (
            {"routing": "tread", "routing_from": 0, "routing_to": 2, "value_residual": True},
            "--model.value_residual with --model.routing_from 0: block 0 has no values",
        ),
        (
            {"routing": "tread", "routing_to": 3, "in_context": 2, "in_context_from": 3},
            "--model.in_context_from 3 is among the blocks that leave tokens out, 2 to 3",
        ),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(PLAIN, **options)
