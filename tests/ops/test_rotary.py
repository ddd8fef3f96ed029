"""Rotary embedding and norm of queries and keys: accuracy, formula, compilation, bytes, tiles and refusals."""

from itertools import product

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from fastdiff_bench.correctness.accuracy import assert_as_accurate_as_eager, evaluate
from fastdiff_kernels import dispatch
from fastdiff_kernels import rotary as op
from fastdiff_kernels.packed_attention import packed_attention
from fastdiff_kernels.rotary import Rotary, rotated, rotated_parts
from tests.support.nights import by_day

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = {
    "DiT-S": (2, 5, 6, 64),
    "DiT-XL": (1, 9, 16, 72),
    "JiT-H": (2, 7, 16, 80),
    "wide heads": (1, 6, 4, 128),
    "one head": (2, 35, 1, 24),
    "odd heads": (2, 3, 3, 14),
    "one pair": (1, 4, 5, 2),
}
"""Samples, tokens, heads, channels of a head."""
PARTS = {
    "both": ("cos", "sin", "q_weight", "k_weight"),
    "rotation": ("cos", "sin"),
    "norm": ("q_weight", "k_weight"),
}
parts = pytest.mark.parametrize("names", PARTS.values(), ids=PARTS)
OPS = {"packed": (rotated, op.rotated_reference), "parts": (rotated_parts, op.rotated_parts_reference)}
forms = pytest.mark.parametrize("form", OPS)
SUMS = {"dbias", "dq_weight", "dk_weight"}


def normal(shape, device, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def arguments(shape, names, device, dtype=torch.float32):
    """A projection, its bias, and of the other arguments the named ones; the first token is not rotated."""
    batch, length, heads, width = shape
    angles = 3 * normal((length, width // 2), device, seed=1)
    angles[:1] = 0
    found = {"cos": angles.cos(), "sin": angles.sin()}
    found |= {f"{n}_weight": 1 + normal((width,), device, dtype, 2 + i) / 2 for i, n in enumerate("qk")}
    found = {name: found[name] for name in names}
    found |= {"u": 3 * normal((batch, length, 3, heads, width), device, dtype)}
    found |= {"bias": normal((3 * heads * width,), device, dtype, 4)}
    return {name: tensor.requires_grad_(name not in ("cos", "sin")) for name, tensor in found.items()}


def upstream(form, shape, device):
    batch, length, heads, width = shape
    if form == "packed":
        return [normal((batch, length, 3, heads, width), device, seed=5)]
    return [normal((batch, heads, length, width), device, seed=5 + i) for i in range(3)]


def by_triton(form):
    return lambda **given: OPS[form][0](**given, backend="triton")


@pytest.mark.parametrize(
    ("name", "names", "form", "dtype"),
    [
        (name, names, form, DTYPES[number % 3])
        for number, (name, (names, form)) in enumerate(product(SHAPES, product(PARTS.values(), OPS)))
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else str(value),
)
def test_as_accurate_as_eager(name, names, form, dtype, device):
    shape = SHAPES[name]
    inputs, seeds = arguments(shape, names, device, dtype), upstream(form, shape, device)
    assert_as_accurate_as_eager(by_triton(form), OPS[form][1], inputs, seeds, sums=SUMS)


@pytest.mark.parametrize("form", OPS)
def test_the_kernel_is_the_formula(form, device):
    """Pairs of neighbours are turned, (1, 0) to (cos, sin), behind the norm; values pass by, and so does a first token
    without angles."""
    shape = _, length, heads, width = (1, 3, 2, 6)
    given = {name: tensor.detach() for name, tensor in arguments(shape, PARTS["both"], device).items()}
    out = by_triton(form)(**given)
    out = out.permute(2, 0, 3, 1, 4).unbind(0) if form == "packed" else out
    u = given["u"].double()
    for part, weight in enumerate((given["q_weight"], given["k_weight"])):
        for token, head in product(range(length), range(heads)):
            x = u[0, token, part, head]
            n = x / (x.square().mean() + 1e-6).sqrt() * weight
            for pair in range(width // 2):
                cos, sin = given["cos"][token, pair].double(), given["sin"][token, pair].double()
                first, second = n[2 * pair], n[2 * pair + 1]
                expected = torch.stack([first * cos - second * sin, first * sin + second * cos])
                got = out[part][0, head, token, 2 * pair : 2 * pair + 2].double()
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(out[2], given["u"][:, :, 2].transpose(1, 2))
    alone = by_triton(form)(**{name: given[name] for name in ("u", "cos", "sin")})
    first = alone[:, 0, 0] if form == "packed" else alone[0][:, :, 0]
    assert torch.equal(first, given["u"][:, 0, 0])


def test_values_are_a_view_and_gradients_are_joined_from_any_layout(device):
    shape = (2, 9, 4, 24)
    inputs = arguments(shape, PARTS["both"], device)
    seeds = upstream("parts", shape, device)
    results = [evaluate(by_triton("parts"), inputs, seeds)]
    assert results[0]["out2"].data_ptr() == inputs["u"][:, :, 2].data_ptr()
    stacked = torch.stack([seed.transpose(1, 2) for seed in seeds], 2).permute(2, 0, 3, 1, 4).unbind(0)
    results.append(evaluate(by_triton("parts"), inputs, stacked))
    results.append(
        evaluate(by_triton("parts"), inputs, [s.transpose(1, 2).contiguous().transpose(1, 2) for s in seeds])
    )
    inputs["u"] = inputs["u"].detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    results.append(evaluate(by_triton("parts"), inputs, seeds))
    for other in results[1:]:
        for name, value in results[0].items():
            assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("backend", ["short", "sdpa"])
def test_packed_attention_turns_its_queries_and_keys(backend, device):
    shape = (2, 16, 2, 64)
    inputs, seeds = arguments(shape, PARTS["both"], device), [normal((2, 16, 128), device, seed=5)]
    given = {name: value.detach() for name, value in inputs.items()}

    def attended(u, bias, rotary, backend=backend):
        return packed_attention(u, bias=bias, rotary=Rotary(**rotary), backend=backend)

    def op_of(backend):
        return lambda u, bias, **rotary: attended(u, bias, rotary, backend)

    with dispatch.forced(adaln="triton"):
        got = evaluate(op_of(backend), inputs, seeds)
    with dispatch.forced(adaln="reference"):
        expected = evaluate(op_of("reference"), inputs, seeds)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-4, msg=name)
    assert not torch.allclose(got["out0"], packed_attention(given["u"], backend="reference"), atol=1e-2)


def test_plain_gradients_are_right(device):
    for (_, reference), names in product(OPS.values(), PARTS.values()):
        inputs = arguments((2, 2, 2, 4), names, device)
        inputs.pop("bias")  # contained in u: moving it alone changes nothing
        inputs = {name: value.detach().double().requires_grad_(value.requires_grad) for name, value in inputs.items()}

        def positional(*values, reference=reference, names=tuple(inputs)):
            return reference(**dict(zip(names, values, strict=True)))

        assert torch.autograd.gradcheck(positional, tuple(inputs.values()))


def test_a_rotation_alone_keeps_nothing_of_the_projection(device):
    for names, kept in ((PARTS["rotation"], False), (PARTS["norm"], True)):
        saved, inputs = [], arguments((1, 4, 2, 8), names, device)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor), lambda _: None):  # noqa: B023
            by_triton("packed")(**inputs)
        assert (inputs["u"].data_ptr() in [tensor.data_ptr() for tensor in saved]) == kept


@pytest.mark.parametrize(
    ("form", "names", "dtype"),
    by_day(zip(OPS, [*PARTS.values()][:2], DTYPES[:2], strict=True), *product(OPS, PARTS.values(), DTYPES)),
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else str(value),
)
def test_compiled_it_is_the_kernels(form, names, dtype, device):
    shape, graphs = (1, 6, 2, 24), []

    def keep(graph, _):
        graphs.append(
            [str(n.target) for n in graph.graph.nodes if n.op == "call_function" and "fastdiff" in str(n.target)]
        )
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(by_triton(form), fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    inputs, seeds = arguments(shape, names, device, dtype), upstream(form, shape, device)
    assert_as_accurate_as_eager(compiled, OPS[form][1], inputs, seeds, sums=SUMS)
    assert graphs == [["fastdiff.rotary_forward.default"], ["fastdiff.rotary_backward.default"]]


@parts
def test_the_ops_pass_opcheck(names, device):
    given = {name: tensor.detach() for name, tensor in arguments((2, 3, 2, 8), names, device, torch.bfloat16).items()}
    others = [given.get(name) for name in ("cos", "sin", "q_weight", "k_weight")]
    for count in (2, 3):
        torch.library.opcheck(op._rotary_triton, (given["u"], *others, 1e-6, count))
    seeds = [seed.bfloat16() for seed in upstream("parts", (2, 3, 2, 8), device)]
    torch.library.opcheck(op._rotary_backward_triton, (*seeds, given["u"], *others, 1e-6))


@forms
def test_nothing_gives_nothing(form, device):
    for shape in ((0, 4, 2, 8), (2, 0, 2, 8)):
        results = evaluate(by_triton(form), arguments(shape, PARTS["both"], device), upstream(form, shape, device))
        assert results["du"].shape == (*shape[:2], 3, *shape[2:])
        assert all(not results[name].any() for name in ("dbias", "dq_weight", "dk_weight"))


@forms
def test_a_head_that_is_not_finite_spoils_itself_and_the_sums(form, device):
    shape = (1, 4, 2, 8)
    inputs = arguments(shape, PARTS["both"], device)
    with torch.no_grad():
        inputs["u"][0, 2, 0, 1, 3] = torch.inf
    results = evaluate(by_triton(form), inputs, upstream(form, shape, device))
    bad = ~results["du"].isfinite()
    assert bad[0, 2, 0, 1].all()
    assert bad.sum() == 8
    assert results["dq_weight"].isnan().any()
    assert results["dk_weight"].isfinite().all()


@pytest.mark.parametrize("width", [2, 14, 24, 48, 64, 72, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("heads", [1, 3, 12, 16])
def test_tiles_cover_heads_and_channels_and_programs_every_token(width, heads):
    like = torch.empty(1, device="meta", dtype=torch.bfloat16)
    for batch, length, passes in product((1, 64), (1, 17, 256), (1, 3)):
        rows, grid, tile = op._plan(like, torch.Size((batch, length, heads, width)), passes)
        assert tile["HEAD"] <= width <= tile["HEAD"] + tile["TAIL"]
        assert heads == grid[1] * tile["BLOCK_H"]
        assert tile["BLOCK_R"] % tile["BLOCK_H"] == 0
        assert rows % (tile["BLOCK_R"] // tile["BLOCK_H"]) == 0
        assert (grid[0] - 1) * rows < batch * length <= grid[0] * rows


@pytest.mark.parametrize("passes", [1, 3])
def test_programs_of_a_training_step_fill_the_processors_of_an_h200(passes):
    """The last wave, or the only one, leaves at most 15 % of the places empty."""
    like = torch.empty(1, device="meta", dtype=torch.bfloat16)
    for batch in (64, 128, 256):
        _, grid, tile = op._plan(like, torch.Size((batch, 256, 16, 72)), passes)
        places = 132 * (2**16 // (32 * tile["num_warps"] * tile["maxnreg"]))
        waves = grid[0] * grid[1] * grid[2] / places
        assert waves / -(-waves // 1) >= 0.85


BYTES = {"both": 16, "rotation": 12, "norm": 16}


@pytest.mark.skipif(torch.cuda.is_available(), reason="counted in the interpreter")
@pytest.mark.parametrize("name", PARTS)
@forms
def test_bytes_per_element_are_those_of_the_documentation(form, name, device):
    from tests.support.benches.traffic import counting

    shape = batch, length, heads, width = (1, 128, 16, 8)
    inputs = arguments(shape, PARTS[name], device, torch.bfloat16)
    with counting() as forward:
        outputs = by_triton(form)(**inputs)
    outputs = [outputs] if form == "packed" else list(outputs)
    wanted = [tensor for tensor in inputs.values() if tensor.requires_grad]
    with counting() as backward:
        torch.autograd.grad(outputs, wanted, [torch.ones_like(output) for output in outputs])
    elements, turned, normed = batch * length * heads * width, "cos" in PARTS[name], "q_weight" in PARTS[name]
    per_row = batch * length * heads * 4 * width  # cosines and sines, which the caches hold
    _, one, _ = op._plan(inputs["u"], torch.Size(shape), 1)
    moved = (12 if form == "packed" else 8) * elements
    assert forward.bytes == moved + turned * per_row + normed * one[0] * 4 * width
    rows, grid, _ = op._plan(inputs["u"], torch.Size(shape), 3)
    sums = 24 * elements // rows + 2 * 3 * heads * width
    weights = grid[0] * (4 * width + 2 * 8 * width) + 4 * width
    assert backward.bytes == BYTES[name] * elements + 2 * turned * per_row + sums + normed * weights


GIVEN = {"u": (1, 2, 3, 2, 4), "cos": (2, 2), "sin": (2, 2), "q_weight": (4,), "k_weight": (4,), "bias": (24,)}
BAD = {
    "shape": ({"u": (2, 4, 24)}, {}, r"u has shape \(2, 4, 24\), expected \[B, T, 3, H, d\] with d even"),
    "odd": ({"u": (1, 2, 3, 2, 5)}, {}, r"u has shape \(1, 2, 3, 2, 5\), expected \[B, T, 3, H, d\] with d even"),
    "wide": ({"u": (1, 1, 3, 1, 514)}, {}, "heads of 514 channels, expected at most 512; use backend 'reference'"),
    "bias": ({"bias": (7,)}, {}, r"bias has shape \(7,\), expected \(24,\)"),
    "tokens": ({"cos": (3, 2)}, {}, r"cos has shape \(3, 2\), expected \(2, 2\) as u is \(1, 2, 3, 2, 4\)"),
    "pairs": ({"sin": (2, 4)}, {}, r"sin has shape \(2, 4\), expected \(2, 2\)"),
    "weight": ({"k_weight": (8,)}, {}, r"k_weight has shape \(8,\), expected \(4,\)"),
    "one table": ({"sin": None}, {}, "of cos and sin one is None, expected both or neither"),
    "one weight": ({"q_weight": None}, {}, "of q_weight and k_weight one is None, expected both or neither"),
    "nothing": (dict.fromkeys(("cos", "sin", "q_weight", "k_weight")), {}, "neither angles nor weights are given"),
    "rounded table": ({}, {"cos": torch.bfloat16}, "cos is torch.bfloat16 on .*, expected torch.float32 on"),
    "other weight": ({}, {"q_weight": torch.bfloat16}, "q_weight is torch.bfloat16 on .*, expected torch.float32 on"),
    "double": ({}, dict.fromkeys(GIVEN, torch.float64), "u is torch.float64, expected float32, bfloat16 or float16"),
}


@forms
@pytest.mark.parametrize(("shapes", "dtypes", "message"), BAD.values(), ids=BAD)
def test_refusals_say_what_was_given(form, shapes, dtypes, message, device):
    given = {
        name: None if shape is None else torch.zeros(shape, device=device, dtype=dtypes.get(name, torch.float32))
        for name, shape in (GIVEN | shapes).items()
    }
    with pytest.raises(ValueError, match=message):
        by_triton(form)(**given)
