"""adaLN: accuracy of its forms, compilation, bytes, grids and refusals."""

from itertools import product

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from fastdiff_bench.correctness.accuracy import assert_as_accurate_as_eager, evaluate
from fastdiff_kernels import adaln
from fastdiff_kernels.adaln import (
    Modulation,
    gated_modulated_norm,
    gated_residual,
    modulated_norm,
    plan,
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


def residual_reference(x, **given):
    return x, adaln.modulated_norm_reference(x, **given)


FORMS = {
    "modulated": (modulated_norm, adaln.modulated_norm_reference, 2),
    "residual": (residual_modulated_norm, residual_reference, 2),
    "gated": (gated_modulated_norm, adaln.gated_modulated_norm_reference, 3),
    "biased": (gated_modulated_norm, adaln.gated_modulated_norm_reference, 3),
    "gate": (gated_residual, adaln.gated_residual_reference, 1),
    "biased gate": (gated_residual, adaln.gated_residual_reference, 1),
}
FORMS |= {f"rms {form}": FORMS[form] for form in ("modulated", "residual", "biased")}
FORMS |= {"rms gated, no weight": FORMS["gated"]}
"""Op, reference, and parts of the modulation that it takes; biased: with the bias of the layer before."""
SUMS = {"dpacked", "dbias", "dweight"}
FIRST, PARTS = 1, 6
"""First part of the modulation that the op takes, and parts in all."""
forms = pytest.mark.parametrize("form", FORMS)
norms = pytest.mark.parametrize("form", [form for form in FORMS if "gate" not in form.split()])


def plainly(form):
    """The form of layer norm."""
    return form.removeprefix("rms ").removesuffix(", no weight")


def norm_of(form):
    return {"norm": "rms"} if form.startswith("rms") else {}


def has_branch(form):
    return plainly(form) not in ("modulated", "residual")


def is_pair(form):
    return plainly(form) in ("residual", "gated", "biased")


def has_weight(form):
    return form.startswith("rms") and not form.endswith("no weight")


def normal(shape, device, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def arguments(form, shape, device, dtype=torch.float32):
    """Inputs by name; ``packed`` has shift, scale and gate in one tensor, as the model has them."""
    batch, _, width = shape
    inputs = {"x": normal(shape, device, dtype, 2), "packed": normal((batch, PARTS * width), device, dtype, 1)}
    if has_branch(form):
        inputs["branch"] = normal(shape, device, dtype, 3)
    if plainly(form).startswith("biased"):
        inputs["bias"] = normal((width,), device, dtype, 5)
    if has_weight(form):
        inputs["weight"] = 1 + normal((width,), device, dtype, 4) / 2
    return {name: tensor.requires_grad_() for name, tensor in inputs.items()}


def upstream(form, shape, device):
    return [normal(shape, device, seed=6 + i) for i in range(2 if is_pair(form) else 1)]


def modulation_from(packed):
    """The modulation, its first parts being taken already."""
    modulation = Modulation(packed)
    modulation.advance(FIRST)
    return modulation


def by_backend(form, backend):
    def op(packed, **inputs):
        return FORMS[form][0](modulation=modulation_from(packed), **inputs, **norm_of(form), backend=backend)

    return op


def by_triton(form):
    return by_backend(form, "triton")


def by_reference(form):
    """The reference, whose parts are chunks."""

    def op(packed, **inputs):
        _, reference, parts = FORMS[form]
        names = ("gate", "shift", "scale") if parts != 2 else ("shift", "scale")
        chunks = packed.chunk(PARTS, dim=1)[FIRST : FIRST + parts]
        return reference(**inputs, **dict(zip(names, chunks, strict=False)), **norm_of(form))

    return op


def assert_accurate(form, inputs, seeds):
    assert_as_accurate_as_eager(by_triton(form), by_reference(form), inputs, seeds, sums=SUMS)


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
        for factor in inputs.keys() & {"packed", "branch", "weight"}:
            inputs[factor] = (inputs[factor].detach() * 4).round().requires_grad_()
        seeds = [(seed * 4).round() for seed in seeds]
    assert_accurate(form, inputs, seeds)


@pytest.mark.parametrize("form", ["modulated", "residual", "gated", "biased"])
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
    assert_accurate(form, inputs, seeds[: 2 if is_pair(form) else 1])


@forms
@pytest.mark.parametrize("shape", [(0, 4, 32), (2, 0, 32)])
def test_empty_inputs_give_empty_outputs(form, shape, device):
    results = evaluate(by_triton(form), arguments(form, shape, device), upstream(form, shape, device))
    assert results["out0"].shape == results["dx"].shape == shape
    assert results["dpacked"].shape == (shape[0], PARTS * 32)
    assert all(torch.count_nonzero(gradient) == 0 for gradient in results.values())


@norms
def test_a_token_that_is_not_finite_spoils_itself_and_the_sums_of_its_sample(form, device):
    shape = (2, 6, 40)
    inputs = arguments(form, shape, device)
    with torch.no_grad():
        inputs["x"][0, 3, 1] = torch.inf
    results = evaluate(by_triton(form), inputs, upstream(form, shape, device))
    y = results["out1" if is_pair(form) else "out0"]
    *_, dshift, dscale = results["dpacked"].chunk(PARTS, dim=1)[FIRST : FIRST + FORMS[form][2]]
    channels = 1 if norm_of(form) else slice(None)  # a mean would spread it
    assert y[0, 3, channels].isnan().all()
    assert dscale[0, channels].isnan().all()
    assert results["dx"][0, 3].isnan().all()
    assert dshift.isfinite().all()
    for gradient in (results["dx"], dscale):
        assert gradient[1].isfinite().all()
    for tensor in (y, results["dx"]):
        assert tensor[0, :3].isfinite().all()
        assert tensor[0, 4:].isfinite().all()


@pytest.mark.parametrize("mixed", [False, True])
def test_the_ops_of_a_block_write_one_gradient_of_the_modulation(mixed, device):
    """Its parts are those of the ops in their order, also if one of them is plain torch."""

    def block(backend):
        def op(x, packed, branch, bias):
            modulation = Modulation(packed)
            x, y = residual_modulated_norm(x, modulation, backend=backend)
            plain = "reference" if mixed else backend
            x, y = gated_modulated_norm(x, y * branch, modulation, bias=bias, backend=plain)
            return gated_residual(x, y * branch, modulation, bias=bias, backend=backend)

        return op

    shape = (2, 19, 61)
    inputs, seeds = arguments("biased", shape, device, torch.bfloat16), upstream("gate", shape, device)
    assert_as_accurate_as_eager(block("triton"), block("reference"), inputs, seeds, sums=SUMS)


def test_plain_gradients_are_right(device):
    for form in FORMS:
        inputs = {k: v.detach().double().requires_grad_() for k, v in arguments(form, (2, 3, 5), device).items()}

        def positional(*values, form=form, names=tuple(inputs)):
            return by_backend(form, "reference")(**dict(zip(names, values, strict=True)))

        assert torch.autograd.gradcheck(positional, tuple(inputs.values()))


def test_only_what_the_model_holds_anyway_is_saved_with_the_statistics(device):
    saved = []
    inputs = arguments("gated", (2, 6, 40), device, torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor), lambda _: None):
        by_triton("gated")(**inputs)
    held = {inputs[name].data_ptr() for name in ("x", "branch", "packed")}
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
    ("form", "dtype"), by_day(zip(FORMS, [*DTYPES, *DTYPES, *DTYPES, DTYPES[0]], strict=True), *product(FORMS, DTYPES))
)
def test_compiled_it_is_the_kernels(form, dtype, device):
    shape, graphs = (2, 5, 40), []
    inputs = arguments(form, shape, device, dtype)
    assert_as_accurate_as_eager(
        compiled(form, graphs), by_reference(form), inputs, upstream(form, shape, device), sums=SUMS
    )
    called = [[name for name in graph if "fastdiff" in name] for graph in graphs]
    forward = (
        [] if "gate" in form.split() else ["fastdiff.adaln_forward.default"]
    )  # a gate is fused with its neighbours
    assert called == [forward, ["fastdiff.adaln_backward.default" if forward else "fastdiff.gate_backward.default"]]


@forms
def test_the_ops_pass_opcheck(form, device):
    given = {name: tensor.detach() for name, tensor in arguments(form, (2, 3, 24), device, torch.bfloat16).items()}
    x, packed, branch, bias, weight = (given.get(name) for name in ("x", "packed", "branch", "bias", "weight"))
    if "gate" in form.split():
        torch.library.opcheck(adaln._gate_backward_triton, (packed, x, branch, bias, packed, FIRST))
        return
    arrays, rms = (x, branch, bias, weight, packed), bool(norm_of(form))
    torch.library.opcheck(adaln._adaln_triton, (*arrays, FIRST, rms, 1e-6))
    _, rstd, *others = adaln._adaln_triton(*arrays, FIRST, rms, 1e-6)
    later, dh = (packed, x) if is_pair(form) else (None, None)
    mean = None if rms else others[0]
    torch.library.opcheck(adaln._adaln_backward_triton, (later, x, dh, *arrays, FIRST, mean, rstd))


def test_a_second_derivative_is_refused(device):
    inputs = arguments("modulated", (1, 2, 24), device)
    (dx,) = torch.autograd.grad(by_triton("modulated")(**inputs).sum(), inputs["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        dx.sum().backward()


def plans(shape, dtype=torch.bfloat16):
    x = torch.empty(shape, device="meta", dtype=dtype)
    flags = (False, True)
    yield from (plan.forward_plan(x, gated, biased) for gated, biased in product(flags, flags))
    yield from (plan.backward_plan(x, *given) for given in product(flags, flags, flags))
    yield plan.gate_plan(x)


@pytest.mark.parametrize("processors", [1, 108, 132])
@pytest.mark.parametrize("width", [1, 33, 384, 1152, 4096])
def test_programs_cover_every_token(width, processors, monkeypatch):
    monkeypatch.setattr(plan, "processors", lambda _: processors)
    for batch, length in product((1, 7, 64, 3000), (1, 16, 17, 255, 256, 1024)):
        for one in plans((batch, length, width)):
            assert (one.blocks - 1) * one.rows < length <= one.blocks * one.rows
            assert one.rows >= min(length, 9)
            if "BLOCK_HEAD" in one.constants:
                assert one.constants["BLOCK_HEAD"] <= width
                assert one.constants["BLOCK_HEAD"] + one.constants["BLOCK_TAIL"] >= width


@pytest.mark.parametrize("batch", [64, 128, 192, 256])
def test_programs_of_a_training_step_fill_the_processors_of_an_h200(batch):
    """The last wave of each kernel, or its only one, leaves at most 15 % of the places empty."""
    for one in plans((batch, 256, 1152)):
        warps, registers = one.constants["num_warps"], one.constants["maxnreg"]
        places = 132 * (2**16 // (32 * warps * registers))
        waves = batch * one.blocks * -(-1152 // one.constants.get("BLOCK_C", 1152)) / places
        assert waves / -(-waves // 1) >= 0.85, (batch, one)


BYTES = {
    "modulated": ((4, 4), (6, 18)),
    "residual": ((4, 4), (8, 18)),
    "gated": ((8, 6), (12, 28)),
    "biased": ((8, 8), (12, 38)),
    "gate": ((0, 0), (6, 10)),
    "biased gate": ((0, 0), (6, 20)),
    "rms modulated": ((4, 6), (6, 32)),
    "rms residual": ((4, 6), (8, 32)),
    "rms biased": ((8, 10), (12, 52)),
    "rms gated, no weight": ((8, 6), (12, 28)),
}
"""Per element, and per element and token of a program: the table of the module's docstring."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="counted in the interpreter")
@forms
def test_bytes_per_element_are_those_of_the_documentation(form):
    from tests.support.benches.traffic import counting

    batch, length, width = shape = (1, 32, 1152)
    inputs, parts = arguments(form, shape, "cpu", torch.bfloat16), FORMS[form][2]
    with counting() as forward:
        outputs = by_triton(form)(**inputs)
    outputs = list(outputs) if is_pair(form) else [outputs]
    with counting() as backward:
        torch.autograd.grad(outputs, list(inputs.values()), [torch.ones_like(output) for output in outputs])
    elements, biased, gate = batch * length * width, plainly(form).startswith("biased"), "gate" in form.split()
    x = torch.empty(shape, dtype=torch.bfloat16)
    grids = (
        plan.forward_plan(x, parts == 3, biased),
        plan.gate_plan(x) if gate else plan.backward_plan(x, is_pair(form), parts == 3, biased),
    )
    statistics = 0 if gate else (4 if norm_of(form) else 8) * batch * length
    # The gradient of the whole modulation is written, and that by the later ops read.
    rest = 2 * batch * width * (PARTS * (2 if is_pair(form) else 1) + biased + has_weight(form))
    for traffic, one, (per_element, per_row), more in zip(
        (forward, backward), grids, BYTES[form], (0, rest), strict=True
    ):
        assert traffic.bytes == elements * per_element + elements // one.rows * per_row + statistics + more


ALL_DOUBLE = dict.fromkeys(("x", "branch", "bias", "weight", "packed"), torch.float64)
BAD = {
    "two-dimensions": ({"x": (6, 8)}, {}, r"x has shape \(6, 8\), expected \[B, T, D\]"),
    "no-channel": ({"x": (2, 3, 0)}, {}, r"x has shape \(2, 3, 0\), expected \[B, T, D\] with D > 0"),
    "too-wide": ({"x": (1, 1, 4097)}, {}, "4097 channels, expected at most"),
    "samples": ({"packed": (3, 48)}, {}, r"modulation has shape \(3, 48\), expected \(2, K \* 8\)"),
    "width": ({"packed": (2, 47)}, {}, r"modulation has shape \(2, 47\), expected \(2, K \* 8\) as x is \(2, 3, 8\)"),
    "parts": ({"packed": (2, 8)}, {}, r"modulation has 0 of 1 parts left, expected [123]"),
    "branch": ({"branch": (2, 8)}, {}, r"branch has shape \(2, 8\), expected \(2, 3, 8\)"),
    "bias": ({"bias": (2, 8)}, {}, r"bias has shape \(2, 8\), expected \(8,\)"),
    "weight": ({"weight": (7,)}, {}, r"weight has shape \(7,\), expected \(8,\)"),
    "double": ({}, ALL_DOUBLE, "x is torch.float64, expected float32, bfloat16 or float16; use backend 'reference'"),
    "mixed": (
        {}, {"packed": torch.bfloat16}, r"modulation is torch.bfloat16 .*, torch.float32 .*use modulation.to\(x\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("shapes", "dtypes", "message"), BAD.values(), ids=BAD)
def test_refusals_say_what_was_given(shapes, dtypes, message, device):
    sizes = {"x": (2, 3, 8), "branch": (2, 3, 8), "bias": (8,), "weight": (8,), "packed": (2, 48)}
    given = {n: torch.zeros(size, device=device, dtype=dtypes.get(n)) for n, size in (sizes | shapes).items()}
    for form in FORMS:
        names = arguments(form, (1, 1, 1), device).keys()
        if shapes.keys() <= names:
            with pytest.raises(ValueError, match=message):
                by_triton(form)(**{name: given[name] for name in names})


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_layer_norm_has_no_weight_and_another_norm_is_refused(backend, device):
    x, packed, weight = (torch.zeros(shape, device=device) for shape in ((2, 3, 8), (2, 48), (8,)))
    with pytest.raises(
        ValueError, match="a weight is given with norm 'layer', which has none here; expected norm 'rms'"
    ):
        residual_modulated_norm(x, Modulation(packed), weight=weight, backend=backend)
    with pytest.raises(ValueError, match="norm 'batch': expected 'layer' or 'rms'"):
        residual_modulated_norm(x, Modulation(packed), norm="batch", backend=backend)


def test_rms_norm_is_its_formula_rounded_once(device):
    """In 16 bits the weight multiplies before anything is rounded."""
    inputs = arguments("rms modulated", (2, 5, 24), device, torch.bfloat16)
    wide = {name: tensor.detach().double() for name, tensor in inputs.items()}
    shift, scale = wide["packed"].chunk(PARTS, dim=1)[FIRST : FIRST + 2]
    normed = wide["x"] / (wide["x"].square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = normed * wide["weight"] * (1 + scale[:, None]) + shift[:, None]
    y = by_triton("rms modulated")(**inputs)
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("last", ["modulated", "gate"])
def test_an_op_after_the_last_of_a_modulation_is_refused(last, backend, device):
    x, modulation = torch.zeros(2, 3, 8, device=device), Modulation(torch.zeros(2, 48, device=device))
    _, y = residual_modulated_norm(x, modulation, backend=backend)
    if last == "modulated":
        modulated_norm(y, modulation, backend=backend)
    else:
        gated_residual(x, y, modulation, backend=backend)
    with pytest.raises(ValueError, match="the op before is the last that takes its parts of this modulation"):
        residual_modulated_norm(x, modulation, backend=backend)


def test_the_reference_takes_what_the_kernel_refuses(device):
    shift, scale = torch.ones(2, 1, 4097, device=device, dtype=torch.float64)
    x = torch.zeros(1, 1, 4097, device=device).double()
    y = modulated_norm(x, Modulation(torch.cat([shift, scale], 1)), backend="reference")
    assert torch.equal(y[0], shift)
