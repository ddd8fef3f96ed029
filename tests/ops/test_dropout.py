"""Dropout: its mask and share, its gradient, bytes and refusals."""

from functools import partial

import pytest
import torch
from scipy import stats
from torch._dynamo.testing import CompileCounterWithBackend

from fastdiff.rng import Stream, dropout_stream
from fastdiff_bench.correctness.accuracy import assert_as_accurate_as_eager, evaluate
from fastdiff_kernels import dropout as op
from fastdiff_kernels import philox
from fastdiff_kernels.dropout import dropout, dropout_reference
from tests.support.benches.traffic import counting

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PLACES = (7, 2**32 + 9, 2**62 + 1)
"""Positions; the last two need the counter's high word."""
SHAPES = [(3, 32, 8, 8), (2, 5, 7, 3), (2, 130, 5, 4), (1, 1, 1, 1), (3, 6), (2, 12, 19), (2, 4, 3, 2, 5)]
KEY = {"seed": 2**64 - 5, "stream": dropout_stream(3)}
HIGH = 2**32 - 3
"""A stream whose highest bit is set."""
backends = pytest.mark.parametrize("backend", ["triton", "reference"])


def channels_last(x):
    """The same values with channels as the fastest axis, for any number of axes."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def normal(shape, device, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return channels_last(torch.randn(shape, generator=generator)).to(device, dtype)


def number(value, device):
    """A stream as a tensor."""
    return torch.tensor(value, device=device)


def places(count, device):
    return torch.tensor(PLACES[:count], dtype=torch.int64, device=device)


def mask(shape, position, p=0.25, backend="triton", **key):
    """Dropout of a map of ones."""
    ones = channels_last(torch.ones(shape, device=position.device))
    return dropout(ones, p, position=position, backend=backend, **{**KEY, **key}) > 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_and_gradients_are_as_accurate_as_eager_and_equal_to_the_bit(shape, dtype, device):
    inputs = {"x": normal(shape, device, dtype).requires_grad_()}
    upstream = [normal(shape, device, dtype, seed=1)]
    position = places(shape[0], device)
    kernel = partial(dropout, p=0.3, position=position, backend="triton", **KEY)
    reference = partial(
        dropout_reference, p=0.3, position=position, seed=KEY["seed"], stream=number(KEY["stream"], device)
    )
    assert_as_accurate_as_eager(kernel, reference, inputs, upstream)
    ours, eager = (evaluate(by, inputs, upstream) for by in (kernel, reference))
    for name, value in ours.items():
        assert torch.equal(value, eager[name]), name
        assert channels_last(value).stride() == value.stride(), name


@backends
@pytest.mark.parametrize("stream", [KEY["stream"], HIGH])
def test_the_mask_is_that_of_the_documentation(backend, stream, device):
    """Element ``place * C + channel``, counter ``(element // 4, stream, position low, position high)``."""
    shape, p = (2, 5, 3, 2), 0.4
    kept = mask(shape, places(2, device), p=p, backend=backend, stream=stream)
    for n, position in enumerate(PLACES[:2]):
        for channel in range(5):
            for row in range(3):
                for column in range(2):
                    element = (row * 2 + column) * 5 + channel
                    counter = (element // 4, stream, position % 2**32, position // 2**32)
                    words = philox.philox_reference(KEY["seed"], *(torch.tensor(word) for word in counter))
                    share = philox.uniform_reference(words[element % 4])
                    assert kept[n, channel, row, column] == (share >= p)


@backends
def test_a_stream_may_be_a_tensor_whose_low_word_counts(backend, device):
    position = places(2, device)
    for stream in (0, KEY["stream"], HIGH):
        expected = mask((2, 5, 3, 2), position, backend=backend, stream=stream)
        for high in (0, 2**32, -(2**32)):
            given = number(stream + high, device)
            assert torch.equal(mask((2, 5, 3, 2), position, backend=backend, stream=given), expected)


def test_seeds_streams_and_positions_have_masks_of_their_own(device):
    one = mask((1, 64, 4, 4), places(1, device))
    others = [
        mask((1, 64, 4, 4), places(1, device), stream=dropout_stream(4)),
        mask((1, 64, 4, 4), places(1, device), seed=1),
        mask((1, 64, 4, 4), places(1, device) + 1),
    ]
    # Of 1024 elements two masks that keep 3 of 4 differ in 384, with a standard deviation of 15.5.
    for other in others:
        assert abs((one != other).sum().item() - 384) < 5 * 15.5


def test_every_block_has_a_stream_of_its_own_and_of_no_other_purpose():
    streams = [dropout_stream(block) for block in range(1000)]
    assert streams[0] == Stream.DROPOUT
    assert len({*streams, *Stream}) == 1000 + len(Stream) - 1
    assert max(streams) < 2**32
    assert [stream % 256 for stream in streams] == [Stream.DROPOUT] * 1000


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_as_many_are_kept_as_should_be(p, device):
    """In a hundred million runs with other seeds this fails once, by the binomial distribution itself."""
    kept = mask((16, 64, 16, 16), torch.arange(16, device=device), p=p, backend="reference")
    low, high = stats.binom.interval(1 - 1e-8, kept.numel(), 1 - p)
    assert low <= kept.sum().item() <= high


@backends
def test_the_gradient_is_the_mask_over_what_is_kept(backend, device):
    x, position = normal((3, 6, 5, 4), device).requires_grad_(), places(3, device)
    kept = mask(x.shape, position, p=0.2, backend=backend)
    dropout(x, 0.2, position=position, backend=backend, **KEY).sum().backward()
    torch.testing.assert_close(x.grad, kept / 0.8)
    assert torch.equal(x.grad != 0, kept)


@backends
def test_gradients_of_gradients(backend, device):
    x = normal((2, 3, 2, 2), device, torch.float64 if backend == "reference" else torch.float32).requires_grad_()
    position = places(2, device)
    y = dropout(x, 0.5, position=position, backend=backend, **KEY)
    first = torch.autograd.grad(y.square().sum(), x, create_graph=True)[0]
    second = torch.autograd.grad(first.sum(), x)[0]
    torch.testing.assert_close(second, 8.0 * mask(x.shape, position, p=0.5, backend=backend).to(second.dtype))


def test_nothing_but_the_positions_and_the_stream_is_kept_for_the_backward_pass(device):
    x, position, kept = normal((3, 16, 4, 4), device).requires_grad_(), places(3, device), []
    stream = number(11, device)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        dropout(x, 0.5, seed=3, stream=stream, position=position, backend="triton")
    assert [tensor.data_ptr() for tensor in kept] == [position.data_ptr(), stream.data_ptr()]


@pytest.mark.parametrize("gradient", ["other order", "expanded"])
def test_upstream_gradients_of_any_strides(gradient, device):
    x = normal((2, 6, 4, 5), device).requires_grad_()
    upstream = normal(x.shape, device, seed=1)
    upstream = upstream.contiguous() if gradient == "other order" else upstream[:1].expand(2, -1, -1, -1)
    results = [
        evaluate(partial(dropout, p=0.5, position=places(2, device), backend=backend, **KEY), {"x": x}, [upstream])
        for backend in ("triton", "reference")
    ]
    assert torch.equal(results[0]["dx"], results[1]["dx"])


@backends
def test_dropped_elements_are_zero_whatever_they_were(backend, device):
    x, position = channels_last(torch.full((2, 6, 3, 3), torch.nan, device=device)), places(2, device)
    kept = mask(x.shape, position, backend=backend)
    y = dropout(x, 0.25, position=position, backend=backend, **KEY)
    assert torch.equal(y.isnan(), kept)
    assert torch.equal(y == 0, ~kept)


@backends
@pytest.mark.parametrize("shape", [(0, 8, 4, 4), (2, 8, 0, 4)])
def test_empty_inputs_give_empty_outputs(shape, backend, device):
    y = dropout(normal(shape, device), 0.5, position=places(shape[0], device), backend=backend, **KEY)
    assert y.shape == shape


@pytest.mark.parametrize("shape", [(2, 5, 7, 3), (2, 130, 5, 4)])
def test_the_kernel_writes_every_element_and_nothing_else(shape, monkeypatch, device):
    x = normal(shape, device)
    buffer = torch.full((x.numel() + 64,), torch.nan, device=device)
    monkeypatch.setattr(torch, "empty_like", lambda x: buffer[32:-32].view(x.movedim(1, -1).shape).movedim(-1, 1))
    op._dropout_triton._init_fn(x, places(2, device), number(11, device), 0.5, 3)
    assert buffer[32:-32].isfinite().all()
    assert buffer[:32].isnan().all()
    assert buffer[-32:].isnan().all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter does")
@pytest.mark.parametrize(("dtype", "each"), [(torch.bfloat16, 4), (torch.float32, 8)])
def test_bytes_moved(dtype, each, device):
    x = normal((2, 64, 32, 32), device, dtype).requires_grad_()
    programs = x.numel() // 2048
    with counting() as forward:
        y = dropout(x, 0.1, position=places(2, device), backend="triton", **KEY)
    with counting() as backward:
        y.backward(normal(x.shape, device, dtype))
    assert forward.bytes == backward.bytes == each * x.numel() + 16 * programs


def test_the_op_passes_opcheck(device):
    x = normal((2, 6, 3, 3), device).requires_grad_()
    torch.library.opcheck(op._dropout_triton, (x, places(2, device), number(KEY["stream"], device), 0.25, -3))


@backends
def test_one_graph_serves_every_stream_that_is_a_tensor(backend, device):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def block(x, position, stream):
        return dropout(x, 0.25, seed=3, stream=stream, position=position, backend=backend)

    x, position = normal((2, 6, 3, 5), device), places(2, device)
    for stream in range(12):
        expected = dropout(x, 0.25, seed=3, stream=stream, position=position, backend=backend)
        assert torch.equal(block(x, position, number(stream, device)), expected)
    assert counter.frame_count == 1


def test_fp64_is_for_the_reference_alone(device):
    x = normal((2, 6, 3, 3), device, torch.float64)
    given = {"position": places(2, device), **KEY}
    y = dropout(x, 0.25, backend="reference", **given)
    assert torch.equal(y, torch.where(mask(x.shape, places(2, device)), x * (1 / 0.75), 0))
    with pytest.raises(ValueError, match=r"x is torch\.float64, expected float32"):
        dropout(x, 0.25, backend="triton", **given)


X = channels_last(torch.zeros(2, 6, 4, 4))
VALID = {"x": X, "p": 0.1, "seed": 0, "stream": 11, "position": torch.arange(2)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": X[0, 0, 0]}, r"x has shape \(4,\), expected \[N, C, ...\]; use x.reshape"),
        ({"x": X.long()}, r"x is torch.int64, expected float32, bfloat16 or float16; use x.float\(\)"),
        ({"x": X.contiguous()}, r"strides \(96, 16, 4, 1\), expected those of channels_last .*use x.contiguous\("),
        ({"x": torch.empty(1, device="meta").expand(1, 1, 2**17, 2**18)}, "has strides"),
        ({"x": torch.empty(1, 1, 2**17, 2**18, device="meta")}, r"more than 2\*\*34 elements per sample"),
        ({"p": 1.0}, "p 1.0: expected a share of at least 0 and below 1"),
        ({"p": -0.1}, "p -0.1: expected"),
        ({"p": float("nan")}, "p nan: expected"),
        ({"seed": -1}, r"seed -1 is out of range.*seed % 2\*\*64"),
        ({"seed": 2**64}, "seed 18446744073709551616 is out of range"),
        ({"stream": 2**32}, "stream 4294967296 is out of range"),
        ({"stream": torch.tensor(3.0)}, r"stream is torch.float32 of shape \(\), expected torch.int64 of shape \(\)"),
        ({"stream": torch.arange(2)}, r"stream is torch.int64 of shape \(2,\), expected .* or an int"),
        (
            {"stream": torch.tensor(3, device="meta")},
            r"stream is on meta, expected cpu like x; use stream.to\(x.device\)",
        ),
        (
            {"position": torch.arange(3)},
            r"position is torch.int64 of shape \(3,\), expected torch.int64 of shape \(2,\)",
        ),
        ({"position": torch.zeros(2)}, "position is torch.float32"),
        ({"position": torch.arange(2, device="meta")}, r"position is on meta, expected cpu like x; use position.to"),
        ({"backend": "cuda"}, "backend 'cuda': expected 'triton', 'reference'"),
    ],
)
def test_refusals_say_what_was_given_and_what_to_do(backend_on_cpu, changed, message):
    with pytest.raises(ValueError, match=message):
        dropout(**{**VALID, "backend": backend_on_cpu} | changed)
