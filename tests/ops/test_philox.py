"""Philox: known answers, the kernel against the reference, and refusals."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fastdiff_kernels import launch, philox

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEEDS = (0, 1, 2**31, 2**63, 2**64 - 1)
POSITIONS = torch.tensor([0, 1, 2**32 - 1, 2**32, 2**63 - 1], device=DEVICE)
COUNTS = (1, 3, 4, 1023, 1025)

kernel = pytest.mark.skipif(
    DEVICE == "cpu" and not launch.INTERPRETED, reason="needs a CUDA device or TRITON_INTERPRET=1"
)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers_of_random123(counter, key, words):
    got = philox.philox_reference(key, *(torch.tensor([word]) for word in counter))
    assert [int(word) for word in got] == list(words)


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4))
def test_words_are_those_of_exact_integers(seed, counter):
    words, keys = list(counter), [seed % 2**32, seed >> 32]
    for _ in range(10):
        product0, product1 = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        first, third = product1 >> 32 ^ words[1] ^ keys[0], product0 >> 32 ^ words[3] ^ keys[1]
        words = [first, product1 % 2**32, third, product0 % 2**32]
        keys = [(keys[0] + 0x9E3779B9) % 2**32, (keys[1] + 0xBB67AE85) % 2**32]
    got = philox.philox_reference(seed, *(torch.tensor([word]) for word in counter))
    assert [int(word) for word in got] == words


def test_an_element_is_a_lane_of_the_counter_of_the_documentation():
    seed, stream, position, count = 2**40 + 3, 5, 3 * 2**32 + 7, 11
    row = philox.bits(seed, stream, torch.tensor([position]), count)[0]
    for element in range(count):
        counter = (element // 4, stream, position % 2**32, position // 2**32)
        words = philox.philox_reference(seed, *(torch.tensor(word) for word in counter))
        assert row[element] == words[element % 4]


def test_a_longer_draw_starts_with_the_shorter_one():
    long = philox.normal(1, 2, POSITIONS, 40)
    for count in (1, 2, 5, 39):
        assert torch.equal(philox.normal(1, 2, POSITIONS, count), long[:, :count])


def test_extreme_words_give_finite_numbers_in_range():
    words = torch.tensor([0, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
    uniform = philox.uniform_reference(words)
    assert uniform.tolist() == [0.0, uniform[1], uniform[1], 0.0]
    assert 1 - 2**-23 <= uniform[1] < 1
    normal = philox.normal_reference(words)
    assert normal.isfinite().all()
    assert 5.6 < normal.abs().max() < 5.7


@kernel
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_kernel_agrees_to_the_bit_on_words_and_uniforms(seed, count):
    for draw in (philox.bits, philox.uniform):
        expected = draw(seed, 3, POSITIONS, count, "reference")
        assert torch.equal(draw(seed, 3, POSITIONS, count, "triton"), expected)


def _ulps(value, exact):
    """Error of fp32 ``value`` in units of the last place of fp64 ``exact``."""
    exponent = torch.frexp(exact).exponent.double()
    return ((value.double() - exact).abs() / torch.exp2(exponent - 24)).max()


@kernel
def test_kernel_and_reference_draw_the_same_normals_close_to_the_exact_ones():
    position = torch.arange(64, device=DEVICE)
    uniform = philox.uniform(7, 1, position, 4096, "reference")
    radius = (-2 * uniform[:, 0::2].clamp(min=1e-7).double().log()).sqrt()
    angle = 2 * torch.pi * uniform[:, 1::2].double()
    exact = torch.stack([radius * angle.cos(), radius * angle.sin()], -1).flatten(1)
    reference = philox.normal(7, 1, position, 4096, "reference")
    assert _ulps(reference, exact) <= philox.NORMAL_ULPS
    assert torch.equal(philox.normal(7, 1, position[::8], 4096, "triton"), reference[::8])


def test_logarithm_and_turns_are_accurate_where_they_are_hardest():
    """Near 1, at powers of two and at their square roots; at and beside the eighths of a turn."""
    ones = torch.tensor([1e-7, 2.0**-23, 0.5, 0.70710677, 0.70710683, 1.0 - 2.0**-24, 1.0])
    assert _ulps(philox._log(ones)[:-1], ones.double().log()[:-1]) <= 1
    assert philox._log(ones)[-1] == 0
    turns = torch.arange(8) / 8
    turns = torch.cat([turns, (turns + 2.0**-25), (turns - 2.0**-25).clamp(min=0)])
    cos, sin = philox._cos_sin(turns)
    for got, exact in ((cos, (2 * torch.pi * turns.double()).cos()), (sin, (2 * torch.pi * turns.double()).sin())):
        large = exact.abs() > 1e-12  # the fp64 oracle itself loses its place at the zeros
        assert _ulps(got[large], exact[large]) <= 1.5
        assert (got[~large] - exact[~large]).abs().max() < 1e-14


@kernel
@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("count", [1, 6, 1025])
def test_kernel_writes_every_number_and_nothing_else(kind, count):
    buffer = torch.full((3 * count + 8,), torch.nan, device=DEVICE)
    tiles = -(-count // 64)
    philox._philox_kernel[(3 * tiles,)](buffer, POSITIONS[:3], 1, 1, count, tiles, KIND=kind, BLOCK_GROUPS=16)
    assert buffer[: 3 * count].isfinite().all()
    assert buffer[3 * count :].isnan().all()


@kernel
def test_the_op_passes_opcheck():
    for kind in ("bits", "uniform", "normal"):
        torch.library.opcheck(philox._philox_triton, (POSITIONS, -3, 1, 6, kind))


@kernel
def test_the_kernel_is_launched_on_the_device_of_its_tensors(monkeypatch):
    entered, device_of, inside = [], torch.cuda.device_of, []

    class Recorded(device_of):
        def __init__(self, tensor):
            entered.append(tensor.data_ptr())
            super().__init__(tensor)

        def __enter__(self):
            inside.append(1)
            return super().__enter__()

        def __exit__(self, *error):
            inside.pop()
            return super().__exit__(*error)

    class Kernel:
        def __getitem__(self, grid):
            assert inside == [1]
            return launched[grid]

    launched = philox._philox_kernel
    monkeypatch.setattr(torch.cuda, "device_of", Recorded)
    monkeypatch.setattr(philox, "_philox_kernel", Kernel())
    philox.bits(0, 0, POSITIONS, 3, "triton")
    assert len(entered) == 1


def test_an_empty_batch_gives_no_numbers():
    assert philox.normal(0, 0, POSITIONS[:0], 5).shape == (0, 5)


def test_normals_are_normal():
    sample = philox.normal(11, 1, torch.arange(64), 4096).flatten().double()
    size = sample.numel()
    # Standard errors of the moments of a normal sample; 4 of them.
    assert abs(sample.mean()) < 4 * size**-0.5
    assert abs(sample.var() - 1) < 4 * (2 / size) ** 0.5
    assert abs((sample**3).mean()) < 4 * (15 / size) ** 0.5
    assert abs((sample**4).mean() - 3) < 4 * (96 / size) ** 0.5
    assert stats.kstest(sample.numpy(), "norm").pvalue > 1e-3


def test_uniforms_are_uniform():
    sample = philox.uniform(12, 1, torch.arange(64), 4096).flatten()
    assert stats.kstest(sample.double().numpy(), "uniform").pvalue > 1e-3


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 0, torch.arange(3, dtype=torch.int32), 4), ValueError, r"position is torch.int32 .*int64"),
        ((0, 0, torch.zeros(2, 2, dtype=torch.int64), 4), ValueError, r"shape \(2, 2\), expected"),
        ((0, 0, torch.arange(3), 0), ValueError, "count 0 is out of range"),
        ((0, 0, torch.arange(3), -4), ValueError, "count -4 is out of range"),
        ((0, 0, torch.arange(3), 2**34 + 1), ValueError, "count 17179869185 is out of range"),
        ((-1, 0, torch.arange(3), 4), ValueError, r"seed -1 is out of range.*seed % 2\*\*64"),
        ((2**64, 0, torch.arange(3), 4), ValueError, "seed 18446744073709551616 is out of range"),
        ((0, -1, torch.arange(3), 4), ValueError, "stream -1 is out of range"),
        ((0, 2**32, torch.arange(3), 4), ValueError, "stream 4294967296 is out of range"),
        ((0, 0, torch.arange(3), 4, "cuda"), ValueError, "backend 'cuda': expected 'triton', 'reference'"),
    ],
)
def test_refusals_say_what_was_given(arguments, error, message):
    for draw in (philox.bits, philox.uniform, philox.normal):
        with pytest.raises(error, match=message):
            draw(*arguments)


def test_triton_on_a_cpu_tensor_is_refused_outside_the_interpreter(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(RuntimeError, match=r"tensor is on cpu, expected CUDA.*TRITON_INTERPRET=1"):
        philox.bits(0, 0, torch.arange(3), 4, "triton")


def _python(code: str, **environment: str) -> str:
    """Output of ``code`` in a fresh interpreter that finds the kernels."""
    folder = launch.__file__.rsplit("/", 2)[0]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {folder!r})\n{code}"],
        capture_output=True, text=True, timeout=120, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_triton_and_xformers_the_package_imports_and_the_references_run():
    code = """
sys.modules["triton"] = sys.modules["xformers"] = None
import torch
from fastdiff_kernels import philox
from fastdiff_kernels.attention import attention, xformers_problem
assert torch.equal(attention(*torch.ones(3, 1, 2, 5, 8)), torch.ones(1, 2, 5, 8))
assert "pip install 'xformers>=" in xformers_problem()
print(philox.bits(0, 0, torch.tensor([0]), 1).item())
try:
    philox.bits(0, 0, torch.tensor([0]), 1, "triton")
except RuntimeError as error:
    print(error)
"""
    words, message = _python(code).splitlines()
    assert int(words) == 0x6627E8D5
    assert "Triton is not installed" in message


@pytest.mark.gpu
def test_a_gpu_draws_the_numbers_of_a_cpu():
    position = torch.arange(2**32 - 4, 2**32 + 4)
    for draw in (philox.bits, philox.uniform):
        expected = draw(2**63 + 5, 1, position, 4097)
        assert torch.equal(draw(2**63 + 5, 1, position.cuda(), 4097).cpu(), expected)
    expected = philox.normal(2**63 + 5, 1, position, 4097)
    assert torch.equal(philox.normal(2**63 + 5, 1, position.cuda(), 4097).cpu(), expected)
