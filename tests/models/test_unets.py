"""What the UNets of Stable Diffusion and of ADM share: the order of maps, recomputation, compiled blocks, kernels."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_leaves

from fastdiff.config.networks.adm import AdmConfig
from fastdiff.models import adm, unet
from fastdiff.models.adm.blocks import AttentionBlock
from fastdiff.models.unet.blocks import Conv2d, GroupNorm
from fastdiff_kernels import dispatch, group_norm
from tests.support.dispatch_modes import Copies, Strides
from tests.support.nights import by_day
from tests.support.recomputed import calls_of, check_calls
from tests.support.references import adm_networks, unet_reference
from tests.support.references.adm_networks import worst
from tests.support.references.unet_reference import difference, gradients

SMALL = {f"unet {kind}": config for kind, config in unet_reference.SMALL.items()} | adm_networks.SMALL
kinds = pytest.mark.parametrize("kind", SMALL)
BLOCKS = (unet.blocks.ResBlock, adm.blocks.ResBlock, AttentionBlock)
SHAPES = [
    *((1, 1, 8, 8), (2, 3, 8, 8), (1, 3, 4, 4), (2, 1, 4, 4)),
    *((1, 1, 4, 12), (2, 3, 4, 12), (1, 3, 12, 4), (2, 1, 12, 4)),
]
"""Batch, channels, height and width."""
ONE_LEVEL: dict[str, Any] = {"channel_mult": (1,), "attention_resolutions": (8,), "res_blocks": 1}
"""The fewest shapes of blocks, of which each is compiled once."""


def built(config: Any, **options: Any) -> Any:
    return (adm_networks if isinstance(config, AdmConfig) else unet_reference).built(config, **options)


def inputs(config: Any, batch: int = 2, height: int = 8, width: int = 8) -> dict[str, Tensor]:
    """With positions, for what a network drops."""
    if isinstance(config, AdmConfig):
        return adm_networks.inputs(config, batch, height, width) | {"position": torch.tensor([5, 2**40, 7])[:batch]}
    return unet_reference.inputs(config, batch, height, width)


def changed(kind: str, **changes: Any) -> Any:
    """A small network with a dropout, if it can have one; ``depth``: residual blocks of a level."""
    config: Any = SMALL[kind]
    depth = changes.pop("depth", None)
    own = {"dropout": 0.2} if isinstance(config, AdmConfig) else {}
    if depth:
        own |= {"res_blocks" if own else "layers_per_block": depth}
    return replace(config, **own | changes)


def blocks_of(model: Any) -> Counter[type[nn.Module]]:
    return Counter(type(module) for module in model.modules() if isinstance(module, model.block_classes))


@kinds
def test_samples_do_not_mix_and_any_size_goes(kind: str) -> None:
    model, arguments = built(SMALL[kind]), inputs(SMALL[kind], 3, 4, 12)
    whole = model(**arguments)
    for n in range(3):
        alone = model(**{name: value[n : n + 1] for name, value in arguments.items()})
        torch.testing.assert_close(alone[0], whole[n], rtol=1e-4, atol=1e-4)


@kinds
def test_bf16_weights_take_any_input(kind: str) -> None:
    """bf16 rounds to 2^-9 = 0.2 % of a number: a few per cent after 30 layers."""
    arguments = inputs(SMALL[kind])
    exact, rounded = built(SMALL[kind])(**arguments), built(SMALL[kind]).bfloat16()
    for given in (arguments, {**arguments, "noisy": arguments["noisy"].double()}):
        got = rounded(**given)
        assert got.dtype == torch.bfloat16
        assert difference(got, exact) < 0.05


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        # By day two shapes of each kind.
        pytest.param(kind, shape, marks=() if (number + place) % 4 == 0 else pytest.mark.nightly)
        for number, kind in enumerate(SMALL)
        for place, shape in enumerate(SHAPES)
    ],
)
def test_maps_are_channels_last_and_are_not_copied(kind: str, shape: tuple[int, int, int, int]) -> None:
    """Also maps of one row, column or pixel, and images of one channel, which are in both orders at once."""
    batch, channels, height, width = shape
    of_adm = isinstance(SMALL[kind], AdmConfig)
    config = replace(SMALL[kind], channels=channels, **{"learn_sigma": True} if of_adm else {})  # type: ignore[arg-type]
    model = built(config)
    seen: Counter[type[nn.Module]] = Counter()

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        maps = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor) and x.dim() == 4]
        wrong = [tuple(x.shape) for x in maps if not x.permute(0, 2, 3, 1).is_contiguous()]
        assert not wrong, (type(module), wrong)
        seen[type(module)] += 1

    for module in model.modules():
        if isinstance(module, (Conv2d, GroupNorm, *BLOCKS)):
            module.register_forward_hook(check, with_kwargs=True)
    with Copies() as copies:
        model(**inputs(config, batch, height, width))
    assert min(seen[block] for block in (Conv2d, *(block for block in BLOCKS if block in seen))) > 2
    # What each doubling repeats (two paths of a block, if that doubles).
    doublings = (
        (len(config.widths) - 1) * (2 if config.resblock_updown else 1)
        if of_adm
        else len(config.block_out_channels) - 1
    )
    # The input, what each doubling repeats, and the output unless it is in both orders.
    assert copies.found.total() == 1 + doublings + (of_adm or channels > 1), copies.found


@kinds
def test_gradients_of_maps_are_channels_last_and_copied_once_where_maps_join(kind: str) -> None:
    model = built(config := changed(kind, depth=1))
    with dispatch.forced(group_norm="triton", dropout="reference"):
        out = model(**inputs(config))
        upstream = torch.ones_like(out)
        with Strides() as backward:
            out.backward(upstream)
    assert backward.ops["group_norm_backward"] > 10
    assert not backward.disordered
    if isinstance(config, AdmConfig):  # each attention joins the gradients of queries, keys and values
        joins = len(model.output_blocks) + sum(isinstance(module, AttentionBlock) for module in model.modules())
    else:
        joins = 2 * len(config.block_out_channels)
    assert len(backward.copied) == joins, backward.copied


@kinds
@pytest.mark.parametrize("part", [0, 0.5, 1])
def test_recomputation_changes_no_gradient_and_runs_blocks_twice(kind: str, part: float) -> None:
    config = changed(kind)
    plain, again = built(config), built(config, recompute=True)
    stored = int(part * len(again.blocks_in_order()))
    calls = calls_of(again.store_blocks(stored))
    arguments = inputs(config)
    with dispatch.forced(dropout="reference"):
        outputs = [model(**arguments) for model in (plain, again)]
        first, second = (gradients(model, out) for model, out in zip((plain, again), outputs, strict=True))
    assert torch.equal(*outputs)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.count_nonzero(value) for value in first.values())
    check_calls(again, calls, stored)


@pytest.mark.parametrize(
    ("kind", "changes"),
    by_day(
        [("unet sdxl", {"depth": 1})],
        *((f"unet {kind}", {"depth": 2}) for kind in unet_reference.SMALL),
        *(("iddpm", ONE_LEVEL), ("iddpm", {"depth": 1}), ("adm added", {"dropout": 0.0})),
    ),
)
def test_blocks_compile_whole(kind: str, changes: dict[str, Any]) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counter = CompileCounterWithBackend("aot_eager")
    config = changed(kind, **changes)
    eager, model = built(config), built(config).compile_blocks(backend=counter)
    arguments = inputs(config)
    expected, got = eager(**arguments), model(**arguments)
    assert difference(got, expected) < 1e-5
    found = worst(gradients(model, got), gradients(eager, expected))
    assert found[0] < 1e-5, found
    assert not torch._dynamo.utils.counters["graph_break"]
    blocks = blocks_of(model).total()
    assert 2 < counter.frame_count <= blocks, "at most one graph per block"
    if kind.startswith("unet"):
        assert 8 < counter.frame_count < blocks, "equal shapes share a graph, and more than 8 graphs are allowed"
    model(**arguments)
    assert counter.frame_count == torch._dynamo.utils.counters["stats"]["unique_graphs"], "nothing compiles again"
    assert model.state_dict().keys() == eager.state_dict().keys()


FEW = {"depth": 1, "transformer_layers": (0, 1), "block_out_channels": (16, 16)}


@pytest.mark.parametrize(
    ("kind", "changes", "compiled"),
    by_day(
        [("unet sd2", FEW, True), ("iddpm", ONE_LEVEL, True)],
        *(("unet sd2", FEW, False), ("iddpm", {"depth": 1}, False), ("adm added", {"depth": 1}, False)),
    ),
)
def test_kernels_give_the_numbers_of_the_reference(
    kind: str, changes: dict[str, Any], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: Counter[str] = Counter()
    run = group_norm.run

    def noted(kernel: Any, *args: Any, **options: Any) -> None:
        launched[kernel.__name__] += 1
        run(kernel, *args, **options)

    monkeypatch.setattr(group_norm, "run", noted)
    config = changed(kind, **changes)
    arguments = inputs(config, 2, 4, 4)
    reference, model = built(config), built(config)
    expected = reference(**arguments)
    assert not launched
    if compiled:
        torch._dynamo.reset()
        model.compile_blocks(backend="aot_eager")
    with dispatch.forced(group_norm="triton", dropout="triton"):
        got = model(**arguments)
        second = gradients(model, got)
    assert difference(got, expected) < 1e-5
    found = worst(second, gradients(reference, expected))
    assert found[0] < 2e-5, found
    norms = sum(isinstance(module, GroupNorm) for module in model.modules())
    assert launched["group_norm_fwd_one_pass_kernel"] == launched["group_norm_bwd_one_pass_kernel"] == norms
