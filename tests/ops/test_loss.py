"""Weighted squared error: accuracy of the loss and its gradient, the memory that it reads, and refusals."""

from itertools import product

import pytest
import torch

from fastdiff_bench.correctness.accuracy import assert_as_accurate_as_eager
from fastdiff_kernels import loss as module
from fastdiff_kernels.loss import weighted_mse, weighted_mse_reference
from fastdiff_kernels.noising import Streams, corrupt, dequantised

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEED = 2**64 - 5
PLACES = (7, 2**32 + 9, 2**62 + 1, 8, 9, 2**63 - 1)
TIMES = (43, 11, 30, 1, 37, 20)
TIMESTEPS = 50
SHAPES = {
    "sd-epsilon": ((3, 4, 32, 32), 4, {"clean": False}),
    "sd-v": ((3, 4, 32, 32), 4, {}),
    "learned-variance-offset": ((3, 2, 16, 16), 4, {"offset": 0.1}),
    "prime": ((6, 5, 7, 11), 5, {}),
    "prime-offset": ((3, 2, 7, 11), 2, {"offset": 0.1}),
    "prime-learned-variance": ((6, 3, 5, 7), 6, {"clean": False}),
    "posterior": ((6, 8, 8, 8), 4, {"posterior": True}),
    "posterior-odd-offset": ((3, 4, 3, 3), 4, {"posterior": True, "offset": 0.2}),
    "single-element": ((6, 1, 1, 1), 1, {}),
}


def tables(device):
    """v-prediction along a quarter of a circle, its ends included, and weights of 0 to 3."""
    angle = torch.linspace(0, torch.pi / 2, TIMESTEPS, dtype=torch.float64)
    alpha, sigma = angle.cos(), angle.sin()
    table = torch.stack([alpha, sigma, -sigma, alpha], 1).to(device, torch.float32)
    return {"table": table, "weights": torch.linspace(0, 3, TIMESTEPS, device=device)}


def inputs_of(shape, channels, device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    batch, _, *space = shape
    prediction = torch.randn(batch, channels, *space, generator=generator).to(device, dtype)
    return {
        "prediction": prediction.requires_grad_(),
        "latents": torch.randn(shape, generator=generator).to(device, dtype),
        "position": torch.tensor(PLACES[:batch], device=device),
        "time": torch.tensor(TIMES[:batch], device=device),
        **tables(device),
    }


def with_mask(inputs):
    """The same inputs with a mask of 0, 1 and all weights between, different in each sample."""
    batch, _, height, width = inputs["latents"].shape
    weights = torch.linspace(-0.4, 1.4, batch * height * width).clamp(0, 1).roll(3)
    return inputs | {"mask": weights.view(batch, height, width).to(inputs["latents"].device, torch.float16)}


def with_pixels(inputs):
    """The same inputs with latents that are levels of 0 to 255."""
    levels = (inputs["latents"].detach().float() * 64 + 128).clamp(0, 255).round()
    return inputs | {"latents": levels.to(torch.uint8)}


def by(backend, **options):
    def op(**inputs):
        if inputs["prediction"].dtype == torch.float64:
            return weighted_mse_reference(**inputs, seed=SEED, streams=Streams(), **options)
        return weighted_mse(**inputs, seed=SEED, backend=backend, **options)

    return op


def loss_and_gradient(inputs, backend, **options):
    losses = by(backend, **options)(**inputs)
    return losses, *torch.autograd.grad(losses.sum(), inputs["prediction"])


def covering(names):
    """By day each name with one dtype; by night, and on a GPU, with all."""
    for number, (name, dtype) in enumerate(product(names, DTYPES)):
        by_day = number // 3 % 3 == number % 3 or torch.cuda.is_available()
        yield pytest.param(name, dtype, marks=() if by_day else pytest.mark.nightly)


@pytest.mark.parametrize(("name", "dtype"), list(covering(SHAPES)))
def test_loss_and_gradient_are_as_accurate_as_eager(name, dtype, device):
    shape, channels, options = SHAPES[name]
    upstream = torch.linspace(0.3, 0.7, 2 * shape[0], device=device)[::2]
    assert_as_accurate_as_eager(
        by("triton", **options), by("reference", **options), inputs_of(shape, channels, device, dtype), [upstream]
    )


@pytest.mark.parametrize(("name", "dtype"), list(covering(SHAPES)))
def test_a_masked_loss_and_its_gradient_are_as_accurate_as_eager(name, dtype, device):
    shape, channels, options = SHAPES[name]
    inputs = with_mask(inputs_of(shape, channels, device, dtype))
    assert_as_accurate_as_eager(
        by("triton", **options), by("reference", **options), inputs, [torch.linspace(0.3, 0.7, shape[0], device=device)]
    )


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("shape", [(3, 4, 8, 8), (3, 3, 5, 7)])
def test_outside_of_the_mask_the_gradient_is_0_and_inside_it_that_without_a_mask(shape, backend, device):
    """In all channels; the elements of the mean are all of them, so the rest of the gradient has the same bits."""
    inputs = inputs_of(shape, 2 * shape[1], device)
    inside = with_mask(inputs)["mask"] > 0.5
    losses, gradient = loss_and_gradient(inputs | {"mask": inside.half()}, backend, offset=0.1)
    _, plain = loss_and_gradient(inputs, backend, offset=0.1)
    assert 0 < inside.float().mean() < 1
    assert torch.equal(gradient, plain * inside[:, None])
    assert plain[:, : shape[1]].abs().min() > 0
    nothing = loss_and_gradient(inputs | {"mask": torch.zeros_like(inside).half()}, backend, offset=0.1)
    assert not any(value.any() for value in nothing)
    squares = plain[:, : shape[1]].double() * plain[:, : shape[1]].double() * inside[:, None]
    elements, weights = shape[1] * shape[2] * shape[3], inputs["weights"][inputs["time"]].double()
    expected = squares.sum(dim=(1, 2, 3)) * elements / (4 * weights)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pixels_are_to_the_bit_what_their_dequantised_values_are(dtype, backend, device):
    inputs = with_pixels(inputs_of((3, 4, 5, 7), 4, device, dtype))
    floats = inputs | {"latents": dequantised(inputs["latents"])}
    ours, expected = (loss_and_gradient(each, backend, offset=0.1) for each in (inputs, floats))
    for got, value in zip(ours, expected, strict=True):
        assert torch.equal(got, value)


@pytest.mark.parametrize("scale", [1e-12, 1e-5, 2.0**16, 1e6])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tiny_and_large_loss_scales_lose_nothing(dtype, scale, device):
    """The gradient is rounded to its dtype once, after the scale: half of fp16's range is not spent on the way."""
    inputs = inputs_of((2, 4, 16, 16), 4, device, dtype)
    upstream = torch.tensor([scale], device=device).expand(2)
    assert_as_accurate_as_eager(by("triton"), by("reference"), inputs, [upstream])


def test_an_overflowing_gradient_is_infinite_so_that_a_loss_scaler_sees_it(device):
    inputs = inputs_of((1, 1, 2, 2), 1, device, torch.float16)
    losses = by("triton")(**inputs)
    (gradient,) = torch.autograd.grad(losses, inputs["prediction"], torch.full_like(losses, 1e8))
    assert gradient.isinf().all()


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_the_target_inverts_noise_add(backend, device):
    """epsilon, x0, v and flow matching: the prediction that inverts ``corrupt`` has no loss."""
    alpha, sigma = 0.6, 0.8
    latents = inputs_of((2, 4, 5, 7), 2, device)["latents"]
    position, time = torch.tensor(PLACES[:2], device=device), torch.tensor([0, 1], device=device)
    shared = {"seed": SEED, "offset": 0.1, "posterior": True, "backend": backend}

    def mixed(row):
        return corrupt(latents, position, torch.tensor([row] * 2, device=device), time=time, **shared)[0]

    clean, noise = mixed((1.0, 0.0, 0, 0)), mixed((0.0, 1.0, 0, 0))
    for of_clean, of_noise in ((0.0, 1.0), (1.0, 0.0), (-sigma, alpha), (-1.0, 1.0)):
        table = torch.tensor([(alpha, sigma, of_clean, of_noise)] * 2, device=device)
        perfect = of_clean * clean + of_noise * noise
        losses = weighted_mse(perfect, latents, position, time, table, torch.ones(2, device=device), **shared)
        assert losses.max() < 1e-12
        worse = weighted_mse(perfect + 0.5, latents, position, time, table, torch.ones(2, device=device), **shared)
        torch.testing.assert_close(worse, torch.full_like(worse, 0.25))


def test_the_gradient_agrees_with_the_reference_to_the_bit(device):
    for dtype in DTYPES:
        inputs = inputs_of((2, 4, 5, 7), 4, device, dtype)
        kernel, reference = (
            loss_and_gradient(inputs, backend, offset=0.1, posterior=True) for backend in ("triton", "reference")
        )
        assert torch.equal(kernel[1], reference[1])
        torch.testing.assert_close(kernel[0], reference[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize(("name", "value"), [("prediction", torch.nan), ("latents", torch.inf)])
def test_values_that_are_not_finite_spoil_their_own_sample_only(name, value, device):
    inputs = inputs_of((2, 3, 4, 4), 3, device)
    inputs[name] = inputs[name].detach().clone()
    inputs[name][0, 1, 2, 3] = value
    inputs["prediction"].requires_grad_()
    losses, gradient = loss_and_gradient(inputs, "triton")
    assert losses.isfinite().tolist() == [False, True]
    assert gradient.isfinite().logical_not().nonzero().tolist() == [[0, 1, 2, 3]]


def test_latents_that_the_target_does_not_need_are_not_read(device):
    for backend in ("triton", "reference"):
        inputs = inputs_of((2, 3, 4, 4), 3, device)
        expected = loss_and_gradient(inputs, backend, clean=False)
        inputs["latents"] = torch.full_like(inputs["latents"], torch.nan)
        for got, value in zip(loss_and_gradient(inputs, backend, clean=False), expected, strict=True):
            assert torch.equal(got, value)


def test_the_variance_half_is_not_read_and_gets_no_gradient(device):
    inputs = inputs_of((2, 3, 5, 7), 6, device)
    whole = loss_and_gradient(inputs, "triton")
    with torch.no_grad():
        inputs["prediction"][:, 3:] = torch.nan
    spoiled = loss_and_gradient(inputs, "triton")
    assert torch.equal(whole[0], spoiled[0])
    assert torch.equal(whole[1], spoiled[1])
    assert whole[1][:, :3].abs().min() > 0
    assert whole[1][:, 3:].abs().max() == 0


def strided(kind, contiguous):
    if kind == "channels_last":
        return contiguous.to(memory_format=torch.channels_last)
    if kind == "half of the channels":
        return torch.cat([contiguous, torch.ones_like(contiguous)], 1)[:, : contiguous.shape[1]]
    return contiguous.repeat_interleave(2, 0)[::2]


@pytest.mark.parametrize("kind", ["channels_last", "half of the channels", "every other sample"])
def test_a_prediction_with_other_strides_gives_the_same(kind, device):
    inputs = inputs_of((2, 4, 5, 7), 4, device)
    expected = loss_and_gradient(inputs, "triton")
    view = strided(kind, inputs["prediction"].detach())
    assert not view.is_contiguous()
    copied = module._by_sample(view, 4) is not view
    assert copied == (kind == "channels_last")
    got = loss_and_gradient(inputs | {"prediction": view.requires_grad_()}, "triton")
    for ours, value in zip(got, expected, strict=True):
        assert torch.equal(ours, value)


def test_nothing_is_allocated_for_the_backward_pass(device):
    """The saved tensors are the arguments themselves."""
    inputs = inputs_of((2, 3, 4, 4), 3, device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (saved.append(tensor), tensor)[1], lambda kept: kept):
        by("triton")(**inputs)
    assert {tensor.data_ptr() for tensor in saved} <= {tensor.data_ptr() for tensor in inputs.values()}


def test_two_runs_and_any_split_of_the_batch_agree_to_the_bit(device):
    inputs = inputs_of((3, 2, 7, 9), 2, device)
    whole, again = (loss_and_gradient(inputs, "triton", offset=0.1) for _ in range(2))
    for index in (0, 1):
        assert torch.equal(whole[index], again[index])
    by_sample = ("prediction", "latents", "position", "time")
    for row in range(3):
        one = {k: v[row : row + 1].detach() if k in by_sample else v for k, v in inputs.items()}
        one["prediction"].requires_grad_()
        for got, value in zip(loss_and_gradient(one, "triton", offset=0.1), whole, strict=True):
            assert torch.equal(got[0], value[row])


def test_many_programs_per_sample_are_folded(device):
    inputs = inputs_of((1, 3, 65, 67), 3, device)
    assert module.tiling(3, 65 * 67, by_channel=True).tiles * 3 == 9
    assert_as_accurate_as_eager(
        by("triton", offset=0.1), by("reference", offset=0.1), inputs, [torch.ones(1, device=device)]
    )


def test_an_empty_batch_gives_no_losses(device):
    inputs = inputs_of((1, 3, 4, 4), 3, device)
    by_sample = ("prediction", "latents", "position", "time")
    inputs = {k: v[:0].detach() if k in by_sample else v for k, v in inputs.items()}
    inputs["prediction"].requires_grad_()
    losses, gradient = loss_and_gradient(inputs, "triton")
    assert losses.shape == (0,)
    assert gradient.shape == (0, 3, 4, 4)


def test_the_reference_passes_gradcheck():
    inputs = inputs_of((2, 4, 2, 3), 2, "cpu")
    exact = {k: v.detach().double() if v.is_floating_point() else v for k, v in inputs.items()}
    exact["prediction"].requires_grad_()
    op = by("reference", offset=0.1, posterior=True)
    assert torch.autograd.gradcheck(lambda prediction: op(**exact | {"prediction": prediction}), exact["prediction"])


@pytest.mark.parametrize(("pixels", "masked"), [(False, False), (True, False), (False, True)])
def test_the_ops_pass_opcheck(pixels, masked, device):
    inputs = inputs_of((2, 2, 3, 5), 4, device)
    inputs = with_pixels(inputs) if pixels else inputs
    mask = with_mask(inputs)["mask"] if masked else None
    settings = (mask, -3, list(Streams()), 0.0, False, True)
    torch.library.opcheck(module._weighted_mse_triton, (*inputs.values(), *settings))
    plain = [value.detach() for value in inputs.values()]
    upstream = torch.ones(1, device=device).expand(2)
    torch.library.opcheck(module._weighted_mse_backward_triton, (upstream, *plain, *settings))


@pytest.mark.parametrize(
    ("shape", "channels", "options", "pixels", "forward", "backward"),
    [
        ((1, 4, 64, 64), 4, {"clean": False}, False, 2, 4),
        ((1, 4, 64, 64), 4, {}, False, 4, 6),
        ((1, 4, 64, 64), 4, {"offset": 0.1}, False, 4, 6),
        ((1, 8, 64, 64), 4, {"posterior": True}, False, 6, 8),
        ((1, 4, 64, 64), 8, {"clean": False}, False, 2, 6),
        ((1, 4, 64, 64), 4, {}, True, 3, 5),
        ((1, 4, 64, 64), 4, {"clean": False}, True, 2, 4),
    ],
)
def test_bytes_per_element(shape, channels, options, pixels, forward, backward, device):
    """As the docstring says, to within 2 % for the numbers that each program needs once.

    A mask is loaded by the programs of every channel, from the cache by all but the first: 2 per element.
    """
    if device != "cpu":
        return
    from tests.support.benches.traffic import counting

    inputs = inputs_of(shape, channels, device, torch.bfloat16)
    inputs = with_pixels(inputs) if pixels else inputs
    elements = 4 * 64 * 64
    for given, loaded in ((inputs, 0), (with_mask(inputs), 2)):
        with counting() as traffic:
            losses = by("triton", **options)(**given)
            first = traffic.bytes
            losses.backward()
        assert forward + loaded <= first / elements < 1.02 * (forward + loaded)
        assert backward + loaded <= (traffic.bytes - first) / elements < 1.02 * (backward + loaded)


LATENTS = torch.zeros(2, 4, 8, 8)
INDEX = torch.arange(2)
VALID = {"prediction": LATENTS, "latents": LATENTS, "position": INDEX, "time": INDEX, **tables("cpu"), "seed": 0}


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prediction": LATENTS[:1]}, r"prediction has shape \(1, 4, 8, 8\), expected \(2, 4, 8, 8\) or twice"),
        ({"prediction": torch.zeros(2, 12, 8, 8)}, r"prediction has shape \(2, 12, 8, 8\), expected"),
        ({"prediction": torch.zeros(2, 8, 8, 8), "posterior": True}, r"\(2, 8, 8, 8\), expected \(2, 2, 8, 8\)"),
        ({"prediction": LATENTS.double()}, "prediction is torch.float64, expected float32, bfloat16 or float16"),
        ({"prediction": LATENTS.to("meta")}, "prediction is on meta, the latents on cpu"),
        ({"latents": LATENTS.double()}, "latents are torch.float64"),
        ({"latents": LATENTS.to(torch.uint8), "posterior": True}, "pixels have no posterior"),
        ({"latents": LATENTS.clone().requires_grad_()}, "latents require a gradient"),
        ({"position": torch.arange(3)}, r"position is int64 \[3\], expected int64 \[2\]"),
        ({"time": torch.zeros(2)}, r"time is float32 \[2\], expected int64 \[2\]"),
        ({"time": torch.arange(4)[::2]}, r"time has strides \(2,\).*time.contiguous\(\)"),
        ({"table": torch.zeros(TIMESTEPS, 2)}, r"table is float32 \[50, 2\], expected float32 \[any, 4\]"),
        ({"weights": torch.ones(7)}, r"weights is float32 \[7\], expected float32 \[50\]"),
        ({"weights": torch.ones(TIMESTEPS, dtype=torch.float64)}, "weights is float64"),
        ({"mask": torch.ones(2, 4, 8, 8)}, r"mask is float32 \[2, 4, 8, 8\], expected float16 \[2, 8, 8\]"),
        ({"seed": 2**64}, "seed 18446744073709551616 is out of range"),
    ],
)
def test_refusals_say_what_was_given(changed, message, backend):
    with pytest.raises(ValueError, match=message):
        weighted_mse(**{**VALID, **changed}, backend=backend)
