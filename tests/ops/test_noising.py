"""Noise-add: accuracy, the stream of each random number, bytes and refusals."""

import pytest
import torch

from fastdiff.rng import Stream
from fastdiff_bench.correctness.accuracy import assert_as_accurate_as_eager
from fastdiff_kernels import noising, philox
from fastdiff_kernels.noising import Streams, corrupt, corrupt_reference, dequantised
from tests.support.references.timesteps import uniform_timesteps

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LATENT_DTYPES = (*DTYPES, torch.uint8)
SEEDS = (3, 2**64 - 5)
PLACES = (7, 2**32 + 9, 2**62 + 1)
"""Positions; the last two need the counter's high word."""
TIMESTEPS = 50
SHAPES = {
    "dit": ((2, 4, 32, 32), {}),
    "digits-offset": ((3, 1, 8, 8), {"offset": 0.1, "perturbation": 0.1}),
    "prime-offset": ((2, 5, 7, 11), {"offset": 0.1}),
    "prime-perturbed": ((2, 3, 5, 7), {"perturbation": 0.3}),
    "posterior": ((2, 8, 16, 16), {"posterior": True}),
    "posterior-odd-offset": ((3, 6, 3, 3), {"posterior": True, "offset": 0.2}),
    "single-element": ((1, 1, 1, 1), {"offset": 0.1}),
}


def table_of(device, rows=TIMESTEPS):
    """v-prediction along a quarter of a circle, its ends included."""
    angle = torch.linspace(0, torch.pi / 2, rows, dtype=torch.float64)
    alpha, sigma = angle.cos(), angle.sin()
    return torch.stack([alpha, sigma, -sigma, alpha], 1).to(device, torch.float32)


def latents_of(shape, device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    if dtype == torch.uint8:
        return torch.randint(256, shape, generator=generator, dtype=dtype).to(device)
    return torch.randn(shape, generator=generator).to(device, dtype)


def places(count, device):
    return torch.tensor(PLACES[:count], device=device)


def constant_rows(count, device, alpha, sigma):
    """A table of one row per sample, with a time that picks it."""
    rows = torch.tensor([[alpha, sigma, 0.0, 0.0]], device=device).repeat(count, 1)
    return {"table": rows, "time": torch.arange(count, device=device)}


def normal(seed, stream, position, shape):
    return philox.normal(seed, stream, position, shape.numel(), "reference").view(len(position), *shape)


def assert_close_in_ulps(value, expected, ulps):
    assert value.dtype == expected.dtype == torch.float32
    exponent = torch.frexp(expected).exponent.double()
    error = (value.double() - expected.double()).abs() / torch.exp2(exponent - 24)
    assert error.max() <= ulps


def covering():
    """By day each shape with two dtypes, each dtype with three shapes or more; by night, and on a GPU, all of both."""
    for row, name in enumerate(SHAPES):
        for column, dtype in enumerate(LATENT_DTYPES):
            by_day = (row - column) % len(LATENT_DTYPES) < 2 or torch.cuda.is_available()
            yield pytest.param(name, dtype, marks=() if by_day else pytest.mark.nightly)


@pytest.mark.parametrize(("name", "dtype"), list(covering()))
def test_noisy_latents_are_as_accurate_as_eager(name, dtype, device):
    shape, options = SHAPES[name]
    if dtype == torch.uint8:
        options = {key: value for key, value in options.items() if key != "posterior"}  # which pixels do not have
    noisy = torch.bfloat16 if dtype == torch.uint8 else dtype

    def by(backend):
        def op(latents, position, table):
            if table.dtype == torch.float64:
                return corrupt_reference(latents, position, table, SEEDS[1], Streams(), dtype=torch.float64, **options)
            return corrupt(latents, position, table, seed=SEEDS[1], dtype=noisy, backend=backend, **options)

        return op

    inputs = {
        "latents": latents_of(shape, device, dtype),
        "position": places(shape[0], device),
        "table": table_of(device),
    }
    assert_as_accurate_as_eager(by("triton"), by("reference"), inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_and_reference_agree_to_the_bit(dtype, device):
    inputs = latents_of((2, 6, 5, 7), device, dtype), places(2, device), table_of(device)
    options = {"seed": 3, "offset": 0.1, "perturbation": 0.1, "posterior": True, "dtype": dtype}
    kernel, reference = (corrupt(*inputs, backend=backend, **options) for backend in ("triton", "reference"))
    for got, expected in zip(kernel, reference, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pixels_are_to_the_bit_what_their_dequantised_values_are(dtype, device):
    levels = torch.arange(256, dtype=torch.uint8, device=device).repeat(3).view(3, 2, 8, 16)
    inputs, options = (places(3, device), table_of(device)), {"seed": 3, "offset": 0.1, "dtype": dtype}
    for backend in ("triton", "reference"):
        ours, floats = (corrupt(x, *inputs, backend=backend, **options)[0] for x in (levels, dequantised(levels)))
        assert torch.equal(ours, floats)
    kernel, reference = (corrupt(levels, *inputs, backend=b, **options)[0] for b in ("triton", "reference"))
    assert torch.equal(kernel, reference)


def test_levels_are_spread_evenly_from_minus_one_to_one():
    levels = torch.arange(256, dtype=torch.uint8)
    values = dequantised(levels)
    assert values.dtype == torch.float32
    assert (values[0], values[255]) == (-1.0, 1.0)
    assert torch.equal(values, -values.flip(0))
    exact = levels.double() / 127.5 - 1
    assert 0 < (values.double() - exact).abs().max() < 7.5e-8
    assert (dequantised(levels, torch.float64) - exact).abs().max() < 1e-15
    assert torch.equal(((values + 1) * 127.5).round().to(torch.uint8), levels)


def test_other_dtypes_have_nothing_to_dequantise():
    latents = latents_of((2, 3, 4, 4), "cpu")
    assert torch.equal(dequantised(latents), latents)
    assert torch.equal(dequantised(latents.half()), latents.half().float())


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_is_that_of_the_noise_stream(seed, device):
    position = places(3, device)
    latents = latents_of((3, 3, 5, 7), device)
    noisy, _ = corrupt(latents, position, seed=seed, backend="triton", **constant_rows(3, device, 0.0, 1.0))
    assert_close_in_ulps(noisy, normal(seed, Stream.NOISE, position, latents.shape[1:]), 2)


def test_an_offset_is_one_number_per_sample_and_channel(device):
    position, latents = places(2, device), latents_of((2, 6, 3, 3), device)
    rows = constant_rows(2, device, 0.0, 1.0)
    noisy, _ = corrupt(latents, position, seed=1, offset=0.25, backend="triton", **rows)
    shift = normal(1, Stream.OFFSET, position, torch.Size([6, 1, 1]))
    noise = normal(1, Stream.NOISE, position, latents.shape[1:])
    torch.testing.assert_close(noisy, noise + 0.25 * shift, rtol=0, atol=1e-6)


def test_a_perturbation_is_drawn_from_its_own_stream(device):
    position, latents = places(2, device), latents_of((2, 6, 3, 3), device)
    rows = constant_rows(2, device, 0.0, 1.0)
    noisy, _ = corrupt(latents, position, seed=1, perturbation=0.5, backend="triton", **rows)
    noise, extra = (normal(1, s, position, latents.shape[1:]) for s in (Stream.NOISE, Stream.PERTURBATION))
    torch.testing.assert_close(noisy, noise + 0.5 * extra, rtol=0, atol=1e-6)


def test_a_posterior_is_sampled_from_mean_and_std(device):
    position, latents = places(3, device), latents_of((3, 6, 3, 5), device)
    rows = constant_rows(3, device, 1.0, 0.0)
    clean, _ = corrupt(latents, position, seed=4, posterior=True, backend="triton", **rows)
    mean, std = latents.chunk(2, 1)
    expected = mean + std * normal(4, Stream.POSTERIOR, position, mean.shape[1:])
    torch.testing.assert_close(clean, expected, rtol=0, atol=2e-6)


def test_the_streams_are_those_of_the_run():
    assert Streams() == (Stream.TIMESTEP, Stream.NOISE, Stream.POSTERIOR, Stream.PERTURBATION, Stream.OFFSET)
    assert [name.upper() for name in Streams._fields] == [Stream(value).name for value in Streams()]


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_other_streams_give_other_numbers(backend, device):
    latents, position = torch.zeros(2, 2, 4, 4, device=device), places(2, device)
    ours = {"seed": 0, "offset": 0.1, "perturbation": 0.1, "backend": backend}
    table = table_of(device)
    other = Streams(timestep=10, noise=11, posterior=12, perturbation=13, offset=14)
    noisy, time = corrupt(latents, position, table, streams=other, **ours)
    assert torch.equal(time, uniform_timesteps_of(10, position))
    added = noisy / table[time, 1].view(-1, 1, 1, 1)
    expected = normal(0, 11, position, latents.shape[1:]) + 0.1 * normal(0, 14, position, torch.Size([2, 1, 1]))
    expected = expected + 0.1 * normal(0, 13, position, latents.shape[1:])
    torch.testing.assert_close(added, expected)


def uniform_timesteps_of(stream, position):
    return noising.uniform_time(philox.uniform(0, stream, position, 1, "reference")[:, 0], TIMESTEPS)


@pytest.mark.parametrize("timesteps", [1, 1000, 99_991])
def test_kernel_and_trainer_draw_the_same_timesteps(timesteps, device):
    position = torch.cat([places(3, device), torch.arange(20, device=device)])
    latents = torch.zeros(len(position), 1, 1, 1, device=device)
    _, time = corrupt(latents, position, table_of(device, timesteps), seed=9, backend="triton")
    assert torch.equal(time, uniform_timesteps(9, position, timesteps))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_time_that_is_given_is_used_and_returned(backend, device):
    latents, position, table = latents_of((3, 2, 4, 4), device), places(3, device), table_of(device)
    time = torch.tensor([0, TIMESTEPS - 1, 17], device=device)
    noisy, returned = corrupt(latents, position, table, seed=5, time=time, backend=backend)
    assert returned is time
    alpha, sigma = table[time, :2].T[:, :, None, None, None]
    expected = alpha * latents + sigma * normal(5, Stream.NOISE, position, latents.shape[1:])
    torch.testing.assert_close(noisy, expected)


def test_the_result_does_not_depend_on_the_batch_it_comes_in(device):
    latents, position, table = latents_of((3, 2, 5, 5), device), places(3, device), table_of(device)
    options = {"seed": 2, "offset": 0.1, "perturbation": 0.1, "backend": "triton"}
    whole = corrupt(latents, position, table, **options)
    again = corrupt(latents, position, table, **options)
    parts = [corrupt(latents[n : n + 1], position[n : n + 1], table, **options) for n in range(3)]
    for index in (0, 1):
        assert torch.equal(whole[index], again[index])
        assert torch.equal(whole[index], torch.cat([part[index] for part in parts]))


@pytest.mark.parametrize(("shape", "options"), [((2, 3, 5, 7), {"offset": 0.1}), ((2, 4, 27, 19), {})])
def test_the_kernel_writes_every_element_and_nothing_else(shape, options, monkeypatch, device):
    latents, position, table = latents_of(shape, device), places(2, device), table_of(device)
    count = latents.numel()
    buffer = torch.full((count + 64,), torch.nan, device=device)
    drawn = torch.full((10,), -1, device=device)
    monkeypatch.setattr(noising, "_empty", lambda *_: (buffer[32:-32].view(shape), drawn[4:6]))
    noising._corrupt_triton._init_fn(latents, position, table, None, 0, list(Streams()), *_scales(options), False, None)
    assert buffer[32:-32].isfinite().all()
    assert buffer[:32].isnan().all()
    assert buffer[-32:].isnan().all()
    assert (drawn[4:6] >= 0).all()
    assert drawn.eq(-1).sum() == 8


def _scales(options):
    return options.get("offset", 0.0), options.get("perturbation", 0.0)


def test_an_empty_batch_gives_an_empty_result(device):
    for backend in ("triton", "reference"):
        latents, position = torch.zeros(0, 4, 8, 8, device=device), torch.zeros(0, dtype=torch.int64, device=device)
        noisy, time = corrupt(latents, position, table_of(device), seed=0, backend=backend)
        assert noisy.shape == (0, 4, 8, 8)
        assert time.shape == (0,)


def test_a_latent_that_is_not_finite_spoils_its_own_element_only(device):
    latents, position = latents_of((2, 4, 4, 4), device), places(2, device)
    latents[0, 1, 2, 3] = torch.nan
    time = torch.tensor([10, 10], device=device)
    noisy, _ = corrupt(latents, position, table_of(device), seed=0, time=time, offset=0.1, backend="triton")
    assert torch.equal(noisy.isnan(), latents.isnan())


@pytest.mark.parametrize(("dtype", "given"), [(torch.float32, False), (torch.uint8, True)])
def test_the_op_passes_opcheck(given, dtype, device):
    latents, position, table = latents_of((1, 4, 4, 4), device, dtype), places(1, device), table_of(device)
    time = torch.tensor([1], device=device) if given else None
    posterior = dtype != torch.uint8
    arguments = (latents, position, table, time, -3, list(Streams()), 0.1, 0.1, posterior, torch.bfloat16)
    torch.library.opcheck(noising._corrupt_triton, arguments)


@pytest.mark.parametrize(
    ("dtype", "noisy", "channels", "options", "each"),
    [
        (torch.bfloat16, torch.bfloat16, 4, {}, 4),
        (torch.bfloat16, torch.bfloat16, 4, {"offset": 0.1}, 4),
        (torch.bfloat16, torch.bfloat16, 8, {"posterior": True}, 6),
        (torch.bfloat16, torch.float32, 4, {}, 6),
        (torch.float32, torch.float32, 4, {}, 8),
        (torch.uint8, torch.bfloat16, 4, {}, 3),
        (torch.uint8, torch.float32, 4, {"offset": 0.1}, 5),
    ],
)
def test_bytes_per_element(dtype, noisy, channels, options, each, device):
    """As the docstring says, to within 2 % for the numbers that each program needs once."""
    if device != "cpu":
        return
    from tests.support.benches.traffic import counting

    latents, position, table = latents_of((1, channels, 64, 64), device, dtype), places(1, device), table_of(device)
    with counting() as traffic:
        corrupt(latents, position, table, seed=0, dtype=noisy, backend="triton", **options)
    assert each <= traffic.bytes / (4 * 64 * 64) < 1.02 * each


LATENTS = torch.zeros(2, 4, 8, 8)
VALID = {"latents": LATENTS, "position": torch.arange(2), "table": table_of("cpu"), "seed": 0}


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"latents": LATENTS[0]}, r"latents have shape \(4, 8, 8\), expected \[B, C, H, W\]"),
        ({"latents": LATENTS[:, :0]}, r"latents have shape \(2, 0, 8, 8\).*at least 1"),
        ({"latents": LATENTS[:, :3].contiguous(), "posterior": True}, "3 channels, expected an even number"),
        ({"latents": LATENTS.double()}, r"latents are torch.float64, expected float32.*uint8; use latents.float"),
        ({"latents": LATENTS.to(torch.int8)}, r"latents are torch.int8, expected float32.*or pixels in uint8"),
        ({"latents": LATENTS.to(torch.uint8), "posterior": True}, "pixels have no posterior; use posterior=False"),
        ({"latents": LATENTS.to(memory_format=torch.channels_last)}, r"strides .* use latents.contiguous\(\)"),
        ({"latents": LATENTS.clone().requires_grad_()}, r"require a gradient.*latents.detach\(\)"),
        ({"position": torch.arange(3)}, r"position is int64 \[3\], expected int64 \[2\]"),
        ({"position": torch.zeros(2)}, r"position is float32 \[2\], expected int64 \[2\]"),
        ({"position": torch.arange(4)[::2]}, r"position has strides \(2,\).*position.contiguous\(\)"),
        ({"position": torch.arange(2, device="meta")}, r"position is on meta, expected cpu; use position.to"),
        ({"table": torch.zeros(10, 3)}, r"table is float32 \[10, 3\], expected float32 \[any, 4\]"),
        ({"table": torch.zeros(10, 4).double()}, "table is float64"),
        ({"table": torch.zeros(0, 4)}, "table has 0 rows, expected 1 to"),
        ({"time": torch.zeros(2, dtype=torch.int32)}, r"time is int32 \[2\], expected int64"),
        ({"dtype": torch.float64}, "dtype torch.float64: expected float32, bfloat16 or float16"),
        ({"seed": -1}, r"seed -1 is out of range.*seed % 2\*\*64"),
        ({"seed": 2**64}, "seed 18446744073709551616 is out of range"),
    ],
)
def test_refusals_say_what_was_given(changed, message, backend):
    with pytest.raises(ValueError, match=message):
        corrupt(**{**VALID, **changed}, backend=backend)
