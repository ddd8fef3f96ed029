"""AdamW with fp32 moments in one pass: kernel against reference to the bit, accuracy, skips, norm and clipping."""

import pytest
import torch
from torch import nn

from fastdiff_bench.correctness.accuracy import assert_no_worse
from fastdiff_kernels import launch
from fastdiff_kernels.adamw import _adamw_triton, adamw, adamw_reference, step_numbers
from fastdiff_kernels.adamw.norm import _BLOCK, ArrivingNorm, _norm_triton, _squares_triton, clip, norm

BACKENDS = ("reference", "triton")
NUMEL = 2 * 1024 + 77
LR, DECAY = 1e-2, 0.1


def values(seed, numel=NUMEL):
    """Numbers of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * 10 ** (-4 * torch.rand(numel, generator=generator))


def numbers(step, device, lr=LR):
    return torch.tensor(step_numbers(step, lr, (0.9, 0.999), 1e-8, DECAY), device=device)


def fresh(device, averages, numel=NUMEL):
    return {
        "param": values(99, numel).to(device),
        "m": torch.zeros(numel, device=device),
        "v": torch.zeros(numel, device=device),
        "copy": torch.full((numel,), 7.0, dtype=torch.bfloat16, device=device),
        **{f"average{k}": torch.full((numel,), 7.0 + k, device=device) for k in range(averages)},
    }


SHARES = (0.1, 1.0, 0.7)


def step(state, grad, number, backend, *, scale=0.7, skip=False, flag=torch.bool, copied=True, lr=LR):
    device = state["param"].device
    averages = [state[name] for name in state if name.startswith("average")]
    arguments = (
        state["param"], grad, state["m"], state["v"], numbers(number, device, lr),
        torch.tensor(scale, device=device), torch.tensor(skip, device=device).to(flag),
        state["copy"] if copied else None, averages, torch.tensor(SHARES[: len(averages)], device=device),
    )  # fmt: skip
    if backend == "single operations":
        adamw_reference(*arguments)
    else:
        adamw(*arguments, backend)


def trajectory(device, backend, dtype, averages, steps=3, **options):
    state = fresh(device, averages)
    for number in range(1, steps + 1):
        step(state, values(number).to(device, dtype), number, backend, **options)
    return state


def assert_same_bits(a, b):
    assert a.keys() == b.keys()
    for name in a:
        differ = (a[name].view(torch.uint8) != b[name].view(torch.uint8)).sum()
        assert not differ, f"{name}: {differ} bytes of {a[name].nbytes} differ"


@pytest.mark.parametrize(
    ("dtype", "averages", "copied"), [(torch.bfloat16, 1, True), (torch.float32, 3, True), (torch.float32, 0, False)]
)
def test_kernel_agrees_with_reference_to_the_bit(device, dtype, averages, copied):
    ours = trajectory(device, "triton", dtype, averages, copied=copied)
    assert_same_bits(ours, trajectory(device, "single operations", dtype, averages, copied=copied))
    assert torch.equal(ours["copy"], ours["param"].bfloat16() if copied else torch.full_like(ours["copy"], 7.0))
    if averages == 3:
        assert torch.equal(ours["average1"], ours["param"]), "a share of 1 gives the weights themselves"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_is_as_accurate_as_eager_adamw(device, backend):
    grads = [values(seed).to(device) for seed in (1, 2)]

    def exactly(dtype):
        p = nn.Parameter(values(99).to(device, dtype))
        optimizer = torch.optim.AdamW([p], lr=LR, weight_decay=DECAY)
        average = torch.full_like(p, 7.0)
        for grad in grads:
            p.grad = grad.to(dtype) * torch.tensor(0.7, device=device).to(dtype)
            optimizer.step()
            average.lerp_(p.detach(), torch.tensor(0.1, device=device).to(dtype))
        state = optimizer.state[p]
        return {"param": p.detach(), "m": state["exp_avg"], "v": state["exp_avg_sq"], "average0": average.detach()}

    state = fresh(device, 1)
    for number, grad in enumerate(grads, 1):
        step(state, grad, number, backend)
    assert torch.equal(state.pop("copy"), state["param"].bfloat16())
    assert_no_worse(state, exactly(torch.float32), exactly(torch.float64))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_small_weight_decay_is_not_rounded_to_another(device, backend):
    """1 - 1e-7 in fp32 is 1 - 1.19e-7. Rounding to nearest is right on average, over weights of all mantissas."""
    state, count = fresh(device, 0, 4096), 20
    start = torch.linspace(1, 2, 4096, device=device)
    state["param"] = start.clone()
    for number in range(1, count + 1):
        given = torch.tensor(step_numbers(number, 1e-5, (0.9, 0.999), 1e-8, 1e-2), device=device)
        scalars = torch.ones((), device=device), torch.tensor(False, device=device)
        gradient = torch.zeros_like(start)
        adamw(state["param"], gradient, state["m"], state["v"], given, *scalars, backend=backend)
    shrunk = (1 - state["param"].double() / start.double()).mean() / count
    assert abs(shrunk - 1e-7) < 0.06e-7


@pytest.mark.parametrize("flag", [torch.bool, torch.float32])
@pytest.mark.parametrize("backend", [*BACKENDS, "compile"])
def test_a_skipped_step_moves_nothing_whatever_the_gradient(device, backend, flag):
    if backend == "compile" and flag == torch.float32:
        return  # a minute of Inductor for the same comparison
    state = trajectory(device, backend, torch.bfloat16, 1, steps=1, flag=flag)
    before = {name: value.clone() for name, value in state.items()}
    poisoned = torch.full((NUMEL,), torch.nan, dtype=torch.bfloat16, device=device)
    step(state, poisoned, 2, backend, scale=torch.nan, skip=True, flag=flag)
    assert_same_bits(state, before)
    step(state, poisoned, 2, backend, flag=flag)
    assert all(value.isnan().all() for value in state.values())


@pytest.mark.parametrize("backend", [*BACKENDS, "single operations"])
def test_at_learning_rate_0_only_moments_and_averages_move(device, backend):
    state = fresh(device, 1)
    step(state, values(1).to(device), 1, backend, lr=0.0)
    assert torch.equal(state["param"], values(99).to(device))
    assert (state["m"] != 0).all()
    assert (state["average0"] != 7).all()


# The norm, and what follows from it.


def long_gradient(dtype, device):
    """So many elements that a program adds up two blocks, and the last one less than one."""
    return values(5, 1025 * _BLOCK + 3).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_norm_is_that_of_fp64_rounded_once(device, backend, dtype):
    none = torch.zeros(0, dtype=dtype, device=device)
    for grad in (long_gradient(dtype, device), values(6, 9).to(device, dtype), none):
        expected = grad.double().square().sum().sqrt()
        found = norm(grad, backend)
        assert found.dtype == torch.float32
        assert abs(found.double() - expected) <= 2.0**-23 * expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_norm_of_what_arrives_in_parts_is_that_of_the_whole_to_the_bit(device, backend, dtype):
    """Parts end within the range of a program, or add none; each step takes it anew."""
    grad = long_gradient(dtype, device)
    arriving = ArrivingNorm(grad, backend)
    for factor in (1, 3):
        grad *= factor
        for end in (5, _BLOCK, 3 * _BLOCK + 7, 3 * _BLOCK + 8, 700 * _BLOCK, grad.numel()):
            arriving.add(end)
        assert torch.equal(arriving.take(), norm(grad, backend))


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("backend", BACKENDS)
def test_clipping_and_skipping_follow_from_the_norm(device, backend):
    grad = values(7).to(device)
    length = norm(grad, backend)
    scale, skip = clip(length, 0.5)
    assert not skip
    parameter = nn.Parameter(torch.zeros_like(grad))
    parameter.grad = grad.clone()
    nn.utils.clip_grad_norm_(parameter, 0.5)
    torch.testing.assert_close(grad * scale, parameter.grad, rtol=1e-6, atol=0)
    for unclipped in (clip(length, 1e9), clip(length, 0.0)):
        assert [t.item() for t in unclipped] == [1.0, False]
    for bad in (torch.nan, torch.inf, -torch.inf, 3e19):
        grad[3] = bad
        assert clip(norm(grad, backend), 0.5)[1]


# Torch, traffic, refusals.


def test_the_ops_pass_opcheck(device):
    state = fresh(device, 2)
    flags = torch.tensor(0.7, device=device), torch.tensor(False, device=device)
    flats = [state["param"], values(1).to(device), state["m"], state["v"]]
    averages, shares = [state["average0"], state["average1"]], torch.tensor([0.1, 0.2], device=device)
    for more in ((state["copy"], averages, shares), (None, [], None)):
        torch.library.opcheck(_adamw_triton, (*flats, numbers(1, device), *flags, *more))
    partials = torch.zeros(1, dtype=torch.float64, device=device)
    torch.library.opcheck(_squares_triton, (partials, values(1).to(device), 1))
    torch.library.opcheck(_norm_triton, (partials, values(1).to(device), 1))


def test_bytes_moved_are_those_of_the_docstrings():
    if not launch.INTERPRETED:
        return
    from tests.support.benches import traffic

    numel = 4 * _BLOCK
    for averages, dtype, expected in ((1, torch.bfloat16, 36), (2, torch.float32, 46)):
        state, grad = fresh("cpu", averages, numel), torch.ones(numel, dtype=dtype)
        with traffic.counting() as moved:
            step(state, grad, 1, "triton")
        programs = numel // 1024
        assert moved.bytes == expected * numel + programs * (1 + 4 * (1 + 8 + averages))
        with traffic.counting() as skipped:
            step(state, grad, 1, "triton", skip=True)
        assert skipped.bytes == programs
        with traffic.counting() as moved:
            norm(grad, "triton")
        assert moved.bytes == grad.nbytes + 4 * 16 + 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"param": torch.zeros(9).bfloat16()}, r"param is torch.bfloat16 .* expected torch.float32 of shape \(9,\)"),
        ({"grad": torch.zeros(8)}, r"grad .* \(8,\) on cpu, expected torch.float32 or torch.bfloat16 of shape \(9,\)"),
        ({"grad": torch.zeros(9).half()}, "grad is torch.float16"),
        ({"m": torch.zeros(18)[::2]}, r"m .* has strides \(2,\), expected it to be contiguous; use"),
        ({"v": torch.zeros(9, device="meta")}, "v is .* on meta, expected .* on cpu"),
        ({"numbers": torch.zeros(7)}, r"numbers .* \(7,\) on cpu, expected torch.float32 of shape \(8,\)"),
        ({"grad_scale": torch.ones(1)}, r"grad_scale .* expected torch.float32 of shape \(\)"),
        ({"skip": torch.tensor(1)}, "skip is torch.int64 .* expected torch.bool or torch.float32"),
        ({"copy": torch.zeros(9)}, "copy is torch.float32 .* expected torch.bfloat16"),
        ({"averages": [torch.zeros(9).half()], "shares": torch.ones(1)}, r"averages\[0\] is torch.float16"),
        ({"averages": [torch.zeros(9)]}, "1 averages without shares"),
        ({"averages": [torch.zeros(9)], "shares": torch.ones(2)}, r"shares .* expected torch.float32 of shape \(1,\)"),
    ],
)
def test_refusals_say_what_was_given(changed, message):
    given = {name: torch.zeros(9) for name in ("param", "grad", "m", "v")}
    given |= {"numbers": torch.zeros(8), "grad_scale": torch.ones(()), "skip": torch.tensor(False)}
    for backend in BACKENDS:
        with pytest.raises(ValueError, match=message):
            adamw(**(given | changed), backend=backend)
