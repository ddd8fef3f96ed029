"""adaLN: accuracy of its three forms, compilation, bytes and refusals."""

from itertools import product

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from fastdiff_bench.correctness.accuracy import assert_as_accurate_as_eager, evaluate
from fastdiff_kernels import adaln
from fastdiff_kernels.adaln import (
    gated_modulated_norm,
    gated_modulated_norm_reference,
    modulated_norm,
    modulated_norm_reference,
    residual_modulated_norm,
)
from tests.support.nights import by_day

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = {
    "DiT-S": (1, 5, 384),
    "DiT-B": (1, 5, 768),
    "DiT-L": (2, 3, 1024),
    "DiT-XL": (1, 18, 1152),
    "prime": (2, 19, 61),
    "one-channel": (2, 5, 1),
    "one-token": (3, 1, 24),
    "widest": (1, 2, 4096),
}


def residual_modulated_norm_reference(x, shift, scale):
    return x, modulated_norm_reference(x, shift, scale)


FORMS = {
    "modulated": (modulated_norm, modulated_norm_reference),
    "residual": (residual_modulated_norm, residual_modulated_norm_reference),
    "gated": (gated_modulated_norm, gated_modulated_norm_reference),
    "biased": (gated_modulated_norm, gated_modulated_norm_reference),
}
"""Biased: gated, with the bias of the layer before."""
SUMS = {"dshift", "dscale", "dgate", "dbias"}
forms = pytest.mark.parametrize("form", FORMS)


def normal(shape, device, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def arguments(form, shape, device, dtype=torch.float32):
    """Inputs by name; shift, scale and gate are chunks of one tensor, as the model has them."""
    batch, _, width = shape
    shift, scale, _, gate, _, _ = normal((batch, 6 * width), device, dtype, 1).chunk(6, dim=1)
    inputs = {"x": normal(shape, device, dtype, 2)}
    if form in ("gated", "biased"):
        inputs |= {"branch": normal(shape, device, dtype, 3), "gate": gate}
    if form == "biased":
        inputs["bias"] = normal((width,), device, dtype, 5)
    return {name: tensor.requires_grad_() for name, tensor in (inputs | {"shift": shift, "scale": scale}).items()}


def upstream(form, shape, device):
    return [normal(shape, device, seed=6 + i) for i in range(1 if form == "modulated" else 2)]


def assert_accurate(form, inputs, seeds):
    assert_as_accurate_as_eager(by_triton(form), FORMS[form][1], inputs, seeds, sums=SUMS)


def by_triton(form):
    return lambda **inputs: FORMS[form][0](**inputs, backend="triton")


@pytest.mark.parametrize(
    ("name", "form", "dtype"),
    [
        (name, form, DTYPES[(row + column) % 3])  # each dtype in each form
        for row, name in enumerate(SHAPES)
        for column, form in enumerate(FORMS)
    ],
)
def test_as_accurate_as_eager(name, form, dtype, device):
    shape = SHAPES[name]
    inputs, seeds = arguments(form, shape, device, dtype), upstream(form, shape, device)
    if name == "one-channel":  # the error of a single sum or product is chance, so they are exact
        for factor in ("gate", "scale"):
            if factor in inputs:
                inputs[factor] = (inputs[factor].detach() * 4).round().requires_grad_()
        seeds = [(seed * 4).round() for seed in seeds]
    assert_accurate(form, inputs, seeds)


@forms
def test_a_mean_far_from_zero_costs_no_accuracy(form, device):
    inputs = arguments(form, (1, 3, 160), device)
    inputs["x"] = (inputs["x"].detach() + 100).requires_grad_()
    assert_accurate(form, inputs, upstream(form, (1, 3, 160), device))


@forms
def test_strides_do_not_matter(form, device):
    shape = (2, 7, 48)
    inputs = arguments(form, shape, device)
    for name, tensor in inputs.items():
        apart = tensor.detach().transpose(0, -1).contiguous().transpose(0, -1)
        if tensor.dim() == 1:
            apart = torch.stack([tensor.detach(), torch.full_like(tensor, torch.nan)], 1)[:, 0]
        inputs[name] = apart.requires_grad_()
        assert not inputs[name].is_contiguous()
    seeds = [normal(shape[::-1], device, seed=6).permute(2, 1, 0), torch.ones((), device=device).expand(shape)]
    assert_accurate(form, inputs, seeds[: 1 if form == "modulated" else 2])


@forms
@pytest.mark.parametrize("shape", [(0, 4, 32), (2, 0, 32)])
def test_empty_inputs_give_empty_outputs(form, shape, device):
    results = evaluate(by_triton(form), arguments(form, shape, device), upstream(form, shape, device))
    assert results["out0"].shape == results["dx"].shape == shape
    assert results["dscale"].shape == (shape[0], 32)
    assert all(torch.count_nonzero(gradient) == 0 for gradient in results.values())


@forms
def test_a_token_that_is_not_finite_spoils_itself_and_the_sums_of_its_sample(form, device):
    shape = (2, 6, 40)
    inputs = arguments(form, shape, device)
    with torch.no_grad():
        inputs["x"][0, 3, 1] = torch.inf
    results = evaluate(by_triton(form), inputs, upstream(form, shape, device))
    y = results["out0" if form == "modulated" else "out1"]
    assert y[0, 3].isnan().all()
    assert results["dscale"][0].isnan().all()
    assert results["dshift"].isfinite().all()
    for name in ("dx", "dscale"):
        assert results[name][1].isfinite().all()
    for tensor in (y, results["dx"]):
        assert tensor[0, :3].isfinite().all()
        assert tensor[0, 4:].isfinite().all()


def test_plain_gradients_are_right(device):
    for form, (_, reference) in FORMS.items():
        inputs = {k: v.detach().double().requires_grad_() for k, v in arguments(form, (2, 3, 5), device).items()}

        def positional(*values, reference=reference, names=tuple(inputs)):
            return reference(**dict(zip(names, values, strict=True)))

        assert torch.autograd.gradcheck(positional, tuple(inputs.values()))


def test_only_what_the_model_holds_anyway_is_saved_with_the_statistics(device):
    saved = []
    inputs = arguments("gated", (2, 6, 40), device, torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor), lambda _: None):
        gated_modulated_norm(**inputs, backend="triton")
    held = {inputs[name].data_ptr() for name in ("x", "branch", "gate", "scale")}
    assert held <= {tensor.data_ptr() for tensor in saved}
    others = [tensor for tensor in saved if tensor.data_ptr() not in held]
    assert [(tensor.dtype, tensor.shape) for tensor in others] == [(torch.float32, (2, 6))] * 2


def compiled(form, graphs):
    """The op compiled; what its forward and its backward graph call goes into ``graphs``."""

    def keep(graph, _):
        graphs.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        return graph

    torch._dynamo.reset()
    return torch.compile(by_triton(form), fullgraph=True, backend=aot_autograd(fw_compiler=keep))


@pytest.mark.parametrize(
    ("form", "dtype"), by_day(zip(FORMS, [*DTYPES, DTYPES[0]], strict=True), *product(FORMS, DTYPES))
)
def test_compiled_the_forward_is_plain_and_only_the_backward_a_kernel(form, dtype, device):
    shape, graphs = (2, 5, 40), []
    inputs = arguments(form, shape, device, dtype)
    assert_as_accurate_as_eager(
        compiled(form, graphs), FORMS[form][1], inputs, upstream(form, shape, device), sums=SUMS
    )
    forward, backward = graphs
    assert not any("fastdiff" in name for name in forward)
    assert [name for name in backward if "fastdiff" in name] == ["fastdiff.adaln_backward.default"]


@forms
def test_compiled_without_gradients_no_kernel_is_called(form, device):
    graphs = []
    with torch.no_grad():
        results = evaluate(compiled(form, graphs), arguments(form, (1, 4, 24), device), None)
        expected = evaluate(by_triton(form), arguments(form, (1, 4, 24), device), None)
    assert not any("fastdiff" in name for names in graphs for name in names)
    for name in expected:
        torch.testing.assert_close(results[name], expected[name])


@forms
def test_the_ops_pass_opcheck(form, device):
    x, *rest = (tensor.detach() for tensor in arguments(form, (2, 3, 24), device, torch.bfloat16).values())
    shift, scale = rest[-2:]
    branch, gate, bias = (*rest[:-2], None, None, None)[:3]
    torch.library.opcheck(adaln._adaln_triton, (x, branch, bias, gate, shift, scale, 1e-6))
    _, mean, rstd, *_ = adaln._adaln_triton(x, branch, bias, gate, shift, scale, 1e-6)
    dh = None if form == "modulated" else x
    torch.library.opcheck(adaln._adaln_backward_triton, (x, dh, x, branch, bias, gate, scale, mean, rstd))


def test_a_second_derivative_is_refused(device):
    inputs = arguments("modulated", (1, 2, 24), device)
    (dx,) = torch.autograd.grad(modulated_norm(**inputs, backend="triton").sum(), inputs["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        dx.sum().backward()


@pytest.mark.parametrize("processors", [1, 108, 132])
@pytest.mark.parametrize("width", [1, 33, 384, 1152, 4096])
def test_programs_cover_every_token_and_partial_sums_stay_small(width, processors, monkeypatch):
    monkeypatch.setattr(adaln, "processors", lambda _: processors)
    for batch in (1, 7, 64, 3000):
        for length in (1, 16, 17, 255, 256, 1024):
            rows, blocks, constants = adaln._plan(torch.empty(batch, length, width, device="meta"), gated=False)
            assert (blocks - 1) * rows < length <= blocks * rows
            assert rows >= min(length, 9)
            assert batch * blocks <= max(batch, processors * 16)
            assert constants["BLOCK_HEAD"] <= width <= constants["BLOCK_HEAD"] + constants["BLOCK_TAIL"]


BYTES = {
    "modulated": ((4, 4), (6, 18)),
    "residual": ((4, 4), (8, 18)),
    "gated": ((8, 6), (12, 28)),
    "biased": ((8, 8), (12, 38)),
}
"""Per element, and per element and token of a program: the table of the module's docstring."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="counted in the interpreter")
@forms
def test_bytes_per_element_are_those_of_the_documentation(form):
    from tests.support.benches.traffic import counting

    shape = batch, length, width = (1, 32, 1152)
    rows, _, _ = adaln._plan(torch.empty(shape), gated=False)
    inputs = arguments(form, shape, "cpu", torch.bfloat16)
    with counting() as forward:
        outputs = by_triton(form)(**inputs)
    outputs = [outputs] if form == "modulated" else list(outputs)
    with counting() as backward:
        torch.autograd.grad(outputs, list(inputs.values()), [torch.ones_like(output) for output in outputs])
    elements = batch * length * width
    statistics = 8 * batch * length
    gradients = {"gated": 2 * 3, "biased": 2 * 3 + 4}.get(form, 2 * 2) * batch * width
    for traffic, (per_element, per_row), rest in zip((forward, backward), BYTES[form], (0, gradients), strict=True):
        assert traffic.bytes == elements * per_element + elements // rows * per_row + statistics + rest


ALL_DOUBLE = dict.fromkeys(("x", "branch", "bias", "gate", "shift", "scale"), torch.float64)
BAD = {
    "two-dimensions": ({"x": (6, 8)}, {}, r"x has shape \(6, 8\), expected \[B, T, D\]"),
    "no-channel": ({"x": (2, 3, 0)}, {}, r"x has shape \(2, 3, 0\), expected \[B, T, D\] with D > 0"),
    "too-wide": ({"x": (1, 1, 4097), "shift": (1, 4097), "scale": (1, 4097)}, {}, "4097 channels, expected at most"),
    "shift": ({"shift": (2, 7)}, {}, r"shift has shape \(2, 7\), expected \(2, 8\) as x is \(2, 3, 8\)"),
    "scale": ({"scale": (2, 3, 8)}, {}, r"scale has shape \(2, 3, 8\), expected \(2, 8\)"),
    "branch": ({"branch": (2, 8)}, {}, r"branch has shape \(2, 8\), expected \(2, 3, 8\)"),
    "gate": ({"gate": (1, 8)}, {}, r"gate has shape \(1, 8\), expected \(2, 8\)"),
    "bias": ({"bias": (2, 8)}, {}, r"bias has shape \(2, 8\), expected \(8,\)"),
    "double": ({}, ALL_DOUBLE, "x is torch.float64, expected float32, bfloat16 or float16; use backend 'reference'"),
    "mixed": ({}, {"scale": torch.bfloat16}, r"scale is torch.bfloat16 on .*, torch.float32 on .*use scale.to\(x\)"),
}  # fmt: skip


@pytest.mark.parametrize(("shapes", "dtypes", "message"), BAD.values(), ids=BAD)
def test_refusals_say_what_was_given(shapes, dtypes, message, device):
    sizes = {"x": (2, 3, 8), "branch": (2, 3, 8), "bias": (8,), "gate": (2, 8), "shift": (2, 8), "scale": (2, 8)}
    wanted = {"gated": {*sizes} - {"bias"}, "biased": {*sizes}}
    given = {n: torch.zeros(size, device=device, dtype=dtypes.get(n)) for n, size in (sizes | shapes).items()}
    for form, (op, _) in FORMS.items():
        names = wanted.get(form, {"x", "shift", "scale"})
        if shapes.keys() <= names:
            with pytest.raises(ValueError, match=message):
                op(**{name: given[name] for name in names}, backend="triton")


def test_the_reference_takes_what_the_kernel_refuses(device):
    shift, scale = torch.ones(2, 1, 4097, device=device, dtype=torch.float64)
    y = modulated_norm(torch.zeros(1, 1, 4097, device=device).double(), shift, scale, backend="reference")
    assert torch.equal(y[0], shift)
