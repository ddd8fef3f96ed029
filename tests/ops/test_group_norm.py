"""Group normalisation: the kernels against eager in both memory orders and both forms."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from fastdiff_bench.correctness.accuracy import assert_as_accurate_as_eager, evaluate, exact
from fastdiff_kernels import dispatch
from fastdiff_kernels import group_norm as op
from fastdiff_kernels.group_norm import group_norm, group_norm_reference, tiling
from tests.support.benches.traffic import counting
from tests.support.nights import by_day

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP32, BF16, FP16 = DTYPES
FORMS = ("one pass", "two passes")


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """Both forms whatever the size; two passes in several chunks of several tiles."""
    if request.param == "one pass":
        monkeypatch.setattr(tiling, "_ONE_PASS_BYTES", 2**30)
    else:
        monkeypatch.setattr(tiling, "_ONE_PASS_BYTES", 0)
        monkeypatch.setattr(tiling, "_PROGRAMS_PER_SAMPLE", 2)
    return request.param


def channels_last(x):
    """The same values with channels as the fastest axis, for any number of axes."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


ORDERS = (channels_last, torch.Tensor.contiguous)


def problem(shape, dtype, device, *, order=channels_last, extras="", parameters=FP32, mean=0.0):
    """Inputs that all require gradients, and upstream gradients."""
    make = torch.Generator().manual_seed(sum(shape))

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, generator=make).to(device, dtype)

    affine = shape[:2] if "per sample" in extras else shape[1:2]
    inputs = {
        "x": order(normal(*shape, dtype=FP32) + mean).to(dtype),
        "weight": normal(*affine, dtype=parameters),
        "bias": normal(*affine, dtype=parameters),
    }
    if "shift" in extras:
        inputs["shift"] = normal(*shape[:2])
    upstream = [order(normal(*shape))]
    if "residual" in extras:
        inputs["residual"] = order(normal(*shape))
        upstream.append(order(normal(*shape)))
    return {name: value.requires_grad_() for name, value in inputs.items()}, upstream


def kernel(groups, **options):
    return partial(group_norm, groups=groups, backend="triton", **options)


def check(groups, inputs, upstream, silu=True):
    reference = partial(group_norm_reference, groups=groups, silu=silu)
    assert_as_accurate_as_eager(
        kernel(groups, silu=silu), reference, inputs, upstream, sums={"dweight", "dbias", "dshift"}
    )


EXTRAS = ("", "shift and residual", "per sample", "shift", "residual", "per sample, shift and residual")


@pytest.mark.parametrize(
    ("form", "order", "extras", "dtype"),
    [
        (form, order, extras, DTYPES[(place + number) % 3])  # each dtype in both orders of both forms
        for place, (form, order) in enumerate(product(FORMS, ORDERS))
        for number, extras in enumerate(EXTRAS)
    ],
    indirect=["form"],
)
def test_it_is_as_accurate_as_eager_in_both_orders_and_forms(extras, order, dtype, form, device):
    check(4, *problem((2, 40, 12, 16), dtype, device, order=order, extras=extras))


@pytest.mark.parametrize(
    ("shape", "groups", "dtype", "order"),
    [
        ((1, 320, 16, 16), 16, BF16, channels_last),  # 20, as 640 in 32
        ((1, 320, 8, 8), 32, FP16, channels_last),
        ((1, 320, 8, 8), 32, BF16, torch.Tensor.contiguous),
        ((1, 240, 18, 18), 8, BF16, channels_last),  # 30, as 960 in 32
    ],
)
def test_channel_counts_of_stable_diffusion(shape, groups, dtype, order, device):
    check(groups, *problem(shape, dtype, device, order=order, extras="shift"))


@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((2, 7, 5, 3), 7),
        ((2, 7, 5, 3), 1),
        ((2, 30, 13, 11), 10),
        ((2, 6, 1, 1), 3),
        ((2, 1, 17, 1), 1),
        ((3, 10), 2),
        ((1, 12, 19), 4),
        ((2, 8, 3, 2, 5), 2),
    ],
)
def test_awkward_shapes(shape, groups, form, device, nightly):
    """By day one order in each form; by night, and on a GPU, both in both."""
    cases = {channels_last: "shift and residual", torch.Tensor.contiguous: "per sample"}
    one = ORDERS[(sum(shape) + FORMS.index(form)) % 2]
    for order in ORDERS if nightly or torch.cuda.is_available() else [one]:
        check(groups, *problem(shape, FP16, device, order=order, extras=cases[order]))


@pytest.mark.parametrize("extras", ["shift", "per sample"])
def test_groups_of_more_channels_than_a_fold_reads_at_once(extras, device):
    check(1, *problem((1, 1100, 3, 5), BF16, device, extras=extras))


@pytest.mark.parametrize("groups", [10, 8, 4, 2, 1])
def test_every_number_of_channels_per_group(groups, form, device):
    check(groups, *problem((1, 80, 4, 5), BF16, device), silu=False)


@pytest.mark.parametrize("parameters", [FP32, BF16])
def test_parameters_may_have_the_dtype_of_the_input(parameters, form, device):
    check(4, *problem((2, 16, 4, 4), BF16, device, parameters=parameters, extras="shift"))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_weights_of_each_sample_are_not_rounded_to_the_dtype_of_the_input(backend, form, device):
    """Only outputs are: once, at the end. Factors near 1 are all 1 in bf16, whose places are 2**-7 apart there."""
    inputs, upstream = problem((3, 32, 8, 8), BF16, device, extras="per sample")
    inputs["weight"].data.mul_(2**-10).add_(1)
    upstream = [upstream[0].bfloat16()]
    truth = evaluate(partial(group_norm_reference, groups=4), exact(inputs), upstream)
    for name, value in evaluate(partial(group_norm, groups=4, backend=backend), inputs, upstream).items():
        rounding = (truth[name].to(value.dtype) - truth[name]).norm()
        assert (value - truth[name]).norm() < rounding + 1e-6 * truth[name].norm(), name


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mean", [1e3, -1e4])
def test_a_mean_that_is_large_against_the_spread_costs_no_accuracy(mean, order, form, device):
    check(4, *problem((1, 40, 16, 24), FP32, device, order=order, mean=mean))


def test_channels_and_regions_of_different_means_cost_no_accuracy(form, device):
    inputs, upstream = problem((1, 40, 16, 24), FP32, device)
    with torch.no_grad():
        inputs["x"] += 1e3 * torch.arange(40, device=device)[:, None, None]
        inputs["x"][:, :, 0] += 1e5
    check(4, inputs, upstream)


@pytest.mark.parametrize("gradient", ["other order", "expanded", "sliced"])
@pytest.mark.parametrize("order", ORDERS)
def test_upstream_gradients_of_any_strides(order, gradient, form, device):
    inputs, upstream = problem((2, 8, 4, 6), FP32, device, order=order, extras="residual")
    other = torch.Tensor.contiguous if order is channels_last else channels_last
    upstream = {
        "other order": [other(u) for u in upstream],
        "expanded": [torch.ones((), device=device).expand(u.shape) for u in upstream],
        "sliced": [u.repeat(1, 1, 1, 2)[..., ::2] for u in upstream],
    }[gradient]
    check(2, inputs, upstream)


@pytest.mark.parametrize("order", ORDERS)
def test_outputs_and_gradients_keep_the_strides_of_the_input(order, form, device):
    inputs, upstream = problem((2, 8, 4, 6), BF16, device, order=order, extras="residual")
    results = evaluate(kernel(2), inputs, upstream)
    for name in ("out0", "out1", "dx", "dresidual"):
        assert results[name].stride() == inputs["x"].stride(), name


@pytest.mark.parametrize("used", [0, 1])
def test_either_output_may_go_unused(used, form, device):
    inputs, upstream = problem((2, 8, 4, 6), BF16, device, extras="shift and residual")

    def reference(**given):
        chosen = group_norm_reference(groups=2, **given)[used]
        return chosen + 0 * (given["weight"].sum() + given["bias"].sum())  # h alone does not depend on them

    assert_as_accurate_as_eager(lambda **given: kernel(2)(**given)[used], reference, inputs, upstream[:1])


def test_a_sample_does_not_depend_on_its_batch(form, device):
    inputs, upstream = problem((3, 40, 12, 16), FP32, device)
    alone = {**inputs, "x": inputs["x"][1:2].detach().requires_grad_()}
    whole, part = evaluate(kernel(4), inputs, upstream), evaluate(kernel(4), alone, [upstream[0][1:2]])
    assert all(torch.equal(whole[name][1:2], part[name]) for name in ("out0", "dx"))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_spoils_its_group_and_no_other(bad, form, device):
    inputs, upstream = problem((2, 12, 5, 7), FP32, device, extras="shift")
    clean = evaluate(kernel(4), inputs, upstream)
    with torch.no_grad():
        inputs["x"][1, 4, 2, 3] = bad
    results = evaluate(kernel(4), inputs, upstream)
    for name in ("out0", "dx", "dshift"):
        assert results[name][1, 3:6].isnan().all(), name
        results[name][1, 3:6] = clean[name][1, 3:6]
        assert torch.equal(results[name], clean[name]), name


@pytest.mark.parametrize("value", [0.0, 3.7, 1.1e10])
def test_a_constant_input_gives_the_bias(value, form, device):
    inputs, upstream = problem((1, 12, 5, 31), FP32, device)
    inputs["x"] = channels_last(torch.full((1, 12, 5, 31), value, device=device)).requires_grad_()
    results = evaluate(kernel(4), inputs, upstream)
    expected = F.silu(inputs["bias"].detach())[:, None, None].expand(12, 5, 31)
    torch.testing.assert_close(results["out0"][0], expected)
    assert all(value.isfinite().all() for value in results.values())


@pytest.mark.parametrize("shape", [(0, 8, 4, 4), (2, 8, 0, 4)])
def test_empty_inputs_give_empty_outputs_and_zero_gradients(shape, form, device):
    inputs, upstream = problem(shape, FP32, device, extras="shift")
    results = evaluate(kernel(2), inputs, upstream)
    assert results["out0"].shape == results["dx"].shape == shape
    for name in ("dweight", "dbias", "dshift"):
        assert torch.equal(results[name], torch.zeros_like(inputs[name[1:]]))


def test_only_the_input_and_statistics_are_kept_for_the_backward_pass(device):
    inputs, _ = problem((2, 32, 16, 16), BF16, device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        kernel(8)(**inputs)
    assert [tuple(tensor.shape) for tensor in kept] == [(2, 32, 16, 16), (32,), (32,), (2, 8), (2, 8)]
    assert kept[0].data_ptr() == inputs["x"].data_ptr()


def _bytes(shape, groups, device, **options):
    inputs, upstream = problem(shape, BF16, device, **options)
    with counting() as forward:
        outputs = kernel(groups)(**inputs)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    with counting() as backward:
        torch.autograd.grad(outputs, list(inputs.values()), upstream)
    return forward.bytes, backward.bytes


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter does")
@pytest.mark.parametrize(
    ("channels", "groups", "rows", "extras", "more"),
    [
        pytest.param(640, 32, 256, "", 0, marks=pytest.mark.nightly),
        (160, 4, 128, "", 0),
        (64, 2, 64, "residual", 1),
    ],
)
def test_bytes_moved_in_two_passes(channels, groups, rows, extras, more, device):
    elements, numbers = channels * 32 * 32, channels * 32 * 32 // rows
    forward, backward = _bytes((1, channels, 32, 32), groups, device, extras=extras)
    assert forward == (6 + 4 * more) * elements + 36 * numbers + 8 * groups
    assert backward == (10 + 2 * more) * elements + 68 * numbers + 16 * channels + 4 * groups
    if channels == 640:
        assert forward <= 1.03 * 6 * elements
        assert backward <= 1.03 * 10 * elements


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter does")
@pytest.mark.parametrize(("channels", "extras", "more"), [(320, "", 0), (160, "residual", 1)])
def test_bytes_moved_in_one_pass(channels, extras, more, device):
    hw, groups = 16 * 16, channels // 40
    forward, backward = _bytes((1, channels, 16, 16), groups, device, extras=extras)
    assert forward == (4 + 4 * more) * channels * hw + 8 * channels + 8 * groups
    assert backward == (6 + 2 * more) * channels * hw + 40 * channels


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter does")
def test_weights_of_each_sample_cost_their_gradients_alone(form, device):
    samples, channels = 3, 32
    shared = _bytes((samples, channels, 8, 8), 4, device)
    own = _bytes((samples, channels, 8, 8), 4, device, extras="per sample")
    assert own == (shared[0], shared[1] + (samples - 1) * 8 * channels)


@pytest.mark.parametrize("extras", by_day(["residual", "per sample"], "", "shift"))
def test_the_ops_pass_opcheck(extras, device):
    inputs, upstream = problem((2, 8, 2, 3), FP32, device, extras=extras)
    x, weight, bias = inputs["x"], inputs["weight"], inputs["bias"]
    shift, residual = inputs.get("shift"), inputs.get("residual")
    torch.library.opcheck(op._group_norm_triton, (x, shift, residual, weight, bias, 4, 1e-5, True))
    _, h, mean, rstd = (t.detach() for t in op._group_norm_triton(x, shift, residual, weight, bias, 4, 1e-5, True))
    dh = upstream[1] if residual is not None else None
    state = [None if t is None else t.detach() for t in (shift, weight, bias)]
    arguments = (upstream[0], dh, x.detach() if residual is None else h, *state, mean, rstd, True, residual is not None)
    torch.library.opcheck(op._group_norm_backward_triton, arguments)


def test_the_reference_is_eager_pytorch_and_differentiable(device):
    inputs, _ = problem((2, 6, 2, 3), FP32, device, extras="shift and residual")
    x, weight, bias, shift, residual = inputs.values()
    expected = F.silu(F.group_norm(x + shift[:, :, None, None] + residual, 3, weight, bias, 1e-3))
    y, h = group_norm(x, 3, weight, bias, eps=1e-3, shift=shift, residual=residual, backend="reference")
    assert torch.equal(y, expected)
    assert torch.equal(h, x + shift[:, :, None, None] + residual)
    exact = [value.detach().double().requires_grad_() for value in (x, weight, bias, shift, residual)]
    assert torch.autograd.gradcheck(
        lambda x, weight, bias, shift, residual: group_norm_reference(x, 3, weight, bias, 1e-5, True, shift, residual),
        exact,
    )


def test_weights_of_each_sample_are_those_of_a_norm_of_it_alone(form, device):
    inputs, _ = problem((3, 8, 4, 5), FP32, device, extras="per sample")
    x, weight, bias = inputs.values()
    whole = kernel(2)(x, weight=weight, bias=bias)
    for n in range(3):
        alone = kernel(2)(x[n : n + 1], weight=weight[n], bias=bias[n])
        assert torch.equal(whole[n], alone[0])
    exact = [value.detach().double().requires_grad_() for value in (x, weight, bias)]
    assert torch.autograd.gradcheck(lambda x, weight, bias: group_norm_reference(x, 2, weight, bias), exact)


def test_eps_and_backend_reach_the_implementation(form, device, monkeypatch):
    inputs, _ = problem((2, 6, 2, 3), FP32, device)
    reference = partial(group_norm_reference, groups=3, eps=0.5)
    assert_as_accurate_as_eager(kernel(3, eps=0.5), reference, inputs)
    launched, run = [], op.run
    monkeypatch.setattr(op, "run", lambda *args, **options: launched.append(args[0]) or run(*args, **options))
    with dispatch.forced(group_norm="reference"):
        group_norm(groups=3, **inputs)
    assert not launched
    with dispatch.forced(group_norm="triton"):
        group_norm(groups=3, **inputs)
    assert launched


X = torch.zeros(2, 6, 4, 4)
P = torch.ones(6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": X[0, 0, 0]}, r"x has shape \(4,\), expected \[N, C, ...\]; use x.reshape"),
        ({"x": X.long()}, r"x is torch.int64, expected float32, bfloat16 or float16; use x.float\(\)"),
        ({"x": X[..., ::2]}, r"x of shape \(2, 6, 4, 2\) has strides \(96, 16, 4, 2\), expected .*use x.contiguous\("),
        ({"x": torch.zeros(2, 12, 4, 4)[:, ::2]}, "expected those of contiguous or channels_last memory"),
        ({"x": X[:, :0]}, "groups 3: expected a divisor of the 0 channels of x"),
        ({"x": torch.zeros(1, device="meta").expand(1, 6, 2**15, 2**14)}, "has strides"),
        ({"x": torch.empty(1, 6, 2**15, 2**14, device="meta")}, r"2\*\*31 or more elements per sample"),
        ({"groups": 4}, "groups 4: expected a divisor of the 6 channels of x"),
        ({"groups": 0}, "groups 0: expected a divisor"),
        ({"groups": -3}, "groups -3: expected a divisor"),
        ({"eps": -1e-5}, "eps -1e-05: expected a number that is not negative"),
        ({"eps": float("nan")}, "eps nan: expected"),
        ({"weight": P[:5]}, r"weight has shape \(5,\), expected \(6,\) for x \(2, 6, 4, 4\)"),
        ({"bias": P[None]}, r"bias has shape \(1, 6\), expected \(6,\)"),
        ({"weight": P[None]}, r"weight has shape \(1, 6\), expected \(2, 6\)"),
        ({"weight": P.expand(2, 6)}, r"bias has shape \(6,\), expected \(2, 6\)"),
        ({"weight": P.half()}, r"weight is torch.float16, expected torch.float32; use weight.to\(x.dtype\)"),
        ({"x": X.half(), "bias": P.bfloat16()}, "bias is torch.bfloat16, expected torch.float16 or torch.float32"),
        ({"bias": P.to("meta")}, r"bias is on meta, expected cpu like x; use bias.to\(x.device\)"),
        ({"shift": P}, r"shift has shape \(6,\), expected \(2, 6\)"),
        ({"shift": X[..., 0, 0].double()}, "shift is torch.float64, expected torch.float32"),
        ({"residual": X[:1]}, r"residual has shape \(1, 6, 4, 4\), expected \(2, 6, 4, 4\)"),
        ({"residual": X.half()}, "residual is torch.float16, expected torch.float32"),
        ({"residual": channels_last(X)}, r"residual has strides .* expected those of x, .*empty_like\(x\).copy_"),
        ({"x": channels_last(X), "residual": X}, "residual has strides"),
        ({"backend": "cuda"}, "backend 'cuda': expected 'triton', 'reference'"),
    ],
)
def test_refusals_say_what_was_given_and_what_to_do(backend_on_cpu, change, message):
    with pytest.raises(ValueError, match=message):
        group_norm(**{"x": X, "groups": 3, "weight": P, "bias": P, "backend": backend_on_cpu} | change)


def test_fp64_is_for_the_reference_alone(device):
    x, weight, bias = (value.to(device, torch.float64) for value in (X, P, P))
    assert group_norm(x, 3, weight, bias, backend="reference").dtype == torch.float64
    with pytest.raises(ValueError, match=r"x is torch\.float64, expected float32"):
        group_norm(x, 3, weight, bias, backend="triton")
