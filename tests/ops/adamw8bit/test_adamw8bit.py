"""AdamW with 8-bit moments: kernel against reference to the bit, cuts into ranks, quality, state, refusals."""

import io
from functools import partial
from itertools import accumulate, product

import pytest
import torch
from torch import nn
from torch.nn import functional

from fastdiff.parallel.fragments import Fragment
from fastdiff_bench.correctness.accuracy import assert_no_worse
from fastdiff_kernels import dispatch, launch
from fastdiff_kernels.adamw8bit import BLOCK, AdamW8bit, companding, rounding
from fastdiff_kernels.adamw8bit.blocks import build_blocks, find_straddling
from fastdiff_kernels.adamw8bit.kernels import _adamw8bit_triton, _largest_triton, _table, adamw8bit, largest
from fastdiff_kernels.adamw8bit.reference import DeviceStep, Extras, Moments, Step, adamw8bit_reference
from tests.support.benches.interpreter import patching_once
from tests.support.processes import run_ranks

BACKENDS = ("reference", "triton")
SIZES = {"a": 1, "b": 7, "c": 255, "d": 256, "e": 257, "f": 1000, "g": 64 * 300}
STATE = ("exp_avg_codes", "exp_avg_sq_codes", "exp_avg_scales", "exp_avg_sq_scales")

# Whole blocks, an aligned one behind a short head, a parameter at an odd place, and padding: 2048 + 1008 + 7 + 1500.
NUMEL = 5000
LAYOUT = [
    Fragment("whole", 0, 2048, 0),
    Fragment("head", 240, 1008, 2048),
    Fragment("odd", 3, 7, 3060),
    Fragment("behind", 0, 1500, 3067),
]


def gradient(numel, step, name=""):
    """Gradients of very different sizes in one block."""
    generator = torch.Generator().manual_seed(1000 * step + sum(name.encode()))
    return torch.randn(numel, generator=generator) * 10 ** (-4 * torch.rand(numel, generator=generator))


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert torch.equal(a[name], b[name]), f"{name}: {(a[name] != b[name]).sum()} of {a[name].numel()} differ"


def blocked(device, numel=NUMEL, layout=LAYOUT, straddling=()):
    blocks = build_blocks(layout, torch.device(device), straddling)
    return blocks, Moments(
        torch.zeros(numel, dtype=torch.int8, device=device),
        torch.zeros(numel, dtype=torch.uint8, device=device),
        torch.zeros(blocks.pieces, device=device),
        torch.zeros(blocks.pieces, device=device),
    )


def numbers(number=1, lr=1e-2, seed=0):
    return Step(
        number=number, beta1=0.9, beta2=0.999, shrink=1 - lr * 0.1, rate=lr / (1 - 0.9**number),
        correction=(1 - 0.999**number) ** -0.5, eps=1e-8, seed=seed,
    )  # fmt: skip


def on_device(step, device):
    number, numbers = torch.tensor(step.number, device=device), torch.tensor(step.numbers, device=device)
    return DeviceStep(number=number, numbers=numbers, seed=step.seed)


def trajectory(device, backend, dtype, grad_dtype, steps=3, extras=True, from_device=False, skip=None):
    blocks, moments = blocked(device)
    param = gradient(NUMEL, 99).to(device, dtype)
    copied = torch.full((NUMEL,), 7.0, dtype=torch.bfloat16, device=device)
    averages = [torch.full((NUMEL,), 7.0, device=device) for _ in range(2)]
    more = Extras(
        grad_scale=torch.tensor(0.7, device=device),
        copy=copied if extras else None,
        averages=averages if extras else (),
        shares=torch.tensor([0.1, 1.0], device=device) if extras else None,
        skip=skip,
    )
    call = adamw8bit_reference if backend == "single operations" else partial(adamw8bit, backend=backend)
    for step in range(1, steps + 1):
        grad = gradient(NUMEL, step).to(device, grad_dtype)
        call(param, grad, moments, blocks, on_device(numbers(step), device) if from_device else numbers(step), more)
    state = {name: getattr(moments, name) for name in ("m_codes", "v_codes", "m_scales", "v_scales")}
    return {"param": param, "copy": copied, "average": averages[0], "recent": averages[1], **state}


@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "extras"),
    [
        (dtype, grad_dtype, (row + column) % 2 == 0)
        for row, dtype in enumerate((torch.float32, torch.bfloat16))
        for column, grad_dtype in enumerate((torch.float32, torch.bfloat16, torch.float16))
    ],
)
def test_kernel_agrees_with_reference_to_the_bit_and_leaves_the_rest_alone(device, dtype, grad_dtype, extras):
    ours = trajectory(device, "triton", dtype, grad_dtype, extras=extras)
    assert_same(ours, trajectory(device, "reference", dtype, grad_dtype, extras=extras))
    assert_same(ours, trajectory(device, "triton", dtype, grad_dtype, extras=extras))
    assert ours["m_codes"].unique().numel() > 200
    outside = torch.ones(NUMEL, dtype=torch.bool, device=device)
    for fragment in LAYOUT:
        outside[fragment.offset : fragment.offset + fragment.numel] = False
    assert torch.equal(ours["param"][outside], gradient(NUMEL, 99).to(device, dtype)[outside])
    assert (ours["copy"] == 7)[outside].all()
    assert (ours["average"] == 7)[outside].all()
    if extras and dtype == torch.float32:
        assert torch.equal(ours["recent"][~outside], ours["param"][~outside]), "a share of 1 gives the weights"
    assert not ours["m_codes"][outside].any()
    assert not ours["v_codes"][outside].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", [*BACKENDS, "single operations"])
def test_numbers_on_the_device_give_the_bits_of_those_on_the_host(device, backend, dtype):
    host = trajectory(device, "reference", dtype, torch.bfloat16)
    skip = torch.tensor(0.0, device=device)
    assert_same(trajectory(device, backend, dtype, torch.bfloat16, from_device=True, skip=skip), host)


@pytest.mark.parametrize("flag", [torch.tensor(True), torch.tensor(torch.nan)])
@pytest.mark.parametrize("backend", [*BACKENDS, "single operations"])
def test_a_skipped_step_moves_nothing(device, backend, flag):
    before = trajectory(device, backend, torch.float32, torch.bfloat16, steps=0)
    after = trajectory(device, backend, torch.float32, torch.bfloat16, skip=flag.to(device))
    assert_same(after, before)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_step_from_known_moments_is_as_accurate_as_eager_adamw(device, backend, grad_dtype):
    """Compares what the step computes, so the moments that it starts from are those that the codes stand for."""
    blocks, moments = blocked(device, 4096, [Fragment("p", 0, 4096, 0)])
    param, step = gradient(4096, 99).to(device), numbers(2)
    adamw8bit(param, gradient(4096, 1).to(device), moments, blocks, numbers(1), None, backend)
    rows = [t.clone().view(-1, BLOCK) for t in (moments.m_codes, moments.v_codes)]
    m = companding.decode_m_reference(rows[0], moments.m_scales[:, None]).flatten()
    root = companding.decode_root_v_reference(rows[1], moments.v_scales[:, None]).flatten()
    grad, average = gradient(4096, 2).to(device, grad_dtype), torch.zeros(4096, device=device)

    def exactly(dtype):
        p, g = nn.Parameter(param.to(dtype, copy=True)), grad.to(dtype) * torch.tensor(0.7, device=device).to(dtype)
        optimizer = torch.optim.AdamW([p], lr=1e-2, weight_decay=0.1)
        p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.state[p].update(exp_avg=m.to(dtype), exp_avg_sq=root.to(dtype).square(), step=torch.tensor(1.0))
        p.data.copy_(param)
        p.grad = g
        optimizer.step()
        return {"param": p.detach(), "average": 0.1 * p.detach()}

    oracle, eager, ours = exactly(torch.float64), exactly(torch.float32), {"param": param.clone(), "average": average}
    shares = torch.tensor([0.1], device=device)
    more = Extras(grad_scale=torch.tensor(0.7, device=device), averages=[average], shares=shares)
    adamw8bit(ours["param"], grad, moments, blocks, step, more, backend)
    assert_no_worse(ours, eager, oracle)


# The codes.


def encoded(m, v, step=1):
    scales = torch.stack([m.abs().amax(1), v.sqrt().amax(1)], 1)
    dithers = companding.dither_reference(torch.arange(m.shape[0], dtype=torch.int32)[:, None] * 7919, step)
    codes_m = companding.encode_m_reference(m, scales[:, :1], dithers[0])
    codes_v = companding.encode_root_v_reference(v.sqrt(), scales[:, 1:], dithers[1])
    decoded = companding.decode_m_reference(codes_m, scales[:, :1])
    return codes_m, codes_v, decoded, companding.decode_root_v_reference(codes_v, scales[:, 1:])


def test_codes_are_off_by_less_than_one_step_between_codes():
    m, v = gradient(64 * BLOCK, 1).view(-1, BLOCK), gradient(64 * BLOCK, 2).view(-1, BLOCK).square()
    codes_m, codes_v, m_hat, root = encoded(m, v)
    # Between the codes c and c + 1 of m lie (2c + 1) / 127^2 of the scale; one more code, for rounding at an edge.
    step_m = (2 * (codes_m.abs().float() + 1) + 1) / 127**2 * m.abs().amax(1, keepdim=True)
    assert ((m_hat - m).abs() <= step_m).all()
    assert ((root - v.sqrt()).abs() <= v.sqrt().amax(1, keepdim=True) / 255 * (1 + 1e-5)).all()
    assert codes_v.min() == 1


def test_the_largest_element_and_zero_are_kept():
    m = torch.zeros(3, BLOCK)
    m[0, 5], m[1, 6] = -3.0, 1e-20
    codes_m, _, m_hat, root = encoded(m, m.square())
    assert codes_m[0, 5] == -127
    assert codes_m[1, 6] == 127
    assert codes_m.ne(0).sum() == 2
    torch.testing.assert_close(m_hat, m, rtol=1e-6, atol=0)
    torch.testing.assert_close(root[0, 5], m[0, 5].abs())
    assert not root[2].any(), "a block without a gradient has no second moment"


def test_dither_makes_the_average_over_the_steps_right():
    m, v = gradient(2 * BLOCK, 1).view(-1, BLOCK), gradient(2 * BLOCK, 2).view(-1, BLOCK).square()
    codes = [encoded(m, v, step)[:2] for step in range(1, 257)]
    for mean, exact in (
        (
            torch.stack([c[0].double() for c in codes]).mean(0),
            m.sign() * (m.abs() / m.abs().amax(1, True)).sqrt() * 127,
        ),
        (torch.stack([c[1].double() for c in codes]).mean(0), v.sqrt() / v.sqrt().amax(1, True) * 255),
    ):
        # A sequence of 256 points that are spread evenly; random ones would be off by 0.03, and some by 0.1.
        above_one = exact.abs() >= 1
        assert (mean - exact)[above_one].abs().max() < 0.03


def test_the_two_dithers_are_spread_evenly_and_do_not_depend_on_one_another():
    halves = companding.dither_reference(torch.arange(16, dtype=torch.int32)[:, None] * 2**20, 5)
    u = torch.stack([half.double().flatten() for half in halves]) / 2**16
    assert u.abs().max() <= 0.5
    assert u.mean(1).abs().max() < 0.01
    assert (u.var(1) - 1 / 12).abs().max() < 0.002
    assert torch.corrcoef(u)[0, 1].abs() < 0.05


def test_averages_of_an_element_without_gradient_decay_as_they_should():
    """Nearest rounding would keep both for ever: a step changes them by less than half a code."""
    blocks, moments = blocked("cpu", BLOCK, [Fragment("p", 0, BLOCK, 0)])
    param, exact = torch.zeros(BLOCK), {}
    for step in range(1, 301):
        grad = torch.ones(BLOCK)
        grad[7] = 3.0 if step <= 100 else 0.0
        exact["m"] = 0.9 * exact.get("m", 0) + 0.1 * grad[7]
        exact["v"] = 0.999 * exact.get("v", 0) + 0.001 * grad[7] ** 2
        adamw8bit(param, grad, moments, blocks, numbers(step), None, "reference")
    root = companding.decode_root_v_reference(moments.v_codes.view(1, -1), moments.v_scales[:, None])[0, 7]
    m = companding.decode_m_reference(moments.m_codes.view(1, -1), moments.m_scales[:, None])[0, 7]
    assert abs(root / exact["v"].sqrt() - 1) < 0.02
    assert m.abs() <= 1 / 127**2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tiny_second_moment_never_blows_an_update_up(device, backend):
    """Codes of v are at least 1: whatever the gradients, a step is at most as large as that of the largest element."""
    blocks, moments = blocked(device, BLOCK, [Fragment("p", 0, BLOCK, 0)])
    param, lr = torch.zeros(BLOCK, device=device), 1e-2
    sizes = torch.logspace(-12, 0, BLOCK, device=device)
    for step in range(1, 21):
        before = param.clone()
        grad = sizes * torch.randn(BLOCK, generator=torch.Generator().manual_seed(step)).to(device)
        adamw8bit(param, grad, moments, blocks, numbers(step, lr), None, backend)
        # |m| / sqrt(v) of Adam itself is below 7.3 for these betas; 1/63 for the step of the first code of m.
        assert (param - before).abs().max() <= lr * (0.1 + 7.3 + 1 / 63)
        assert param.isfinite().all()
        assert (moments.v_codes >= 1).all()


# Blocks that straddle ranks.


def zero12(numels, ranks):
    """All parameters joined, padded with zeros and cut into equal parts, in one tensor: fragments of each rank."""
    total = sum(numels.values())
    part = -(-total // ranks)
    layouts = []
    for rank in range(ranks):
        low, high, fragments = rank * part, (rank + 1) * part, []
        for (name, numel), end in zip(numels.items(), accumulate(numels.values()), strict=True):
            first, last = max(end - numel, low), min(end, high)
            if first < last:
                fragments.append(Fragment(name, first - (end - numel), last - first, first - low))
        layouts.append([(part, fragments)])
    return layouts


def zero3(numels, ranks):
    """Every parameter cut into equal, zero-padded parts, which are joined; in two tensors."""
    layouts = []
    for rank in range(ranks):
        tensors = []
        for names in (("a", "b", "c", "d"), ("e", "f", "g")):
            fragments, offset = [], 0
            for name in names:
                part = -(-numels[name] // ranks)
                numel = min(part, numels[name] - rank * part)
                if numel > 0:
                    fragments.append(Fragment(name, rank * part, numel, offset))
                offset += part
            tensors.append((offset, fragments))
        layouts.append(tensors)
    return layouts


def sharded(rank, size, group, cut, backend, *, poisoned, device="cpu"):
    """After each of 3 steps this rank's fragments: by tensor, name and first element, values and scales by block."""
    tensors = [(torch.zeros(numel, device=device), fragments) for numel, fragments in CUTS[cut](SIZES, size)[rank]]
    optimizer = AdamW8bit([tensor for tensor, _ in tensors], lr=1e-2, weight_decay=0.1)
    for tensor, fragments in tensors:
        for f in fragments:
            f.of(tensor).copy_(gradient(SIZES[f.name], 99, f.name)[f.start : f.start + f.numel])
    optimizer.cut(dict(tensors), group)
    options = optimizer.param_groups[0]
    course = []
    with dispatch.forced(adamw8bit=backend):
        for step in range(1, 4):
            for tensor, fragments in tensors:  # one call for each, as ZeRO-3 does
                tensor.grad = torch.zeros_like(tensor)
                for f in fragments:
                    full = gradient(SIZES[f.name], step, f.name)
                    if poisoned and step == 2 and f.name == "f":
                        full[0] = torch.nan
                    f.of(tensor.grad).copy_(full[f.start : f.start + f.numel])
                options["params"] = [tensor]
                optimizer.step()
            course.append(
                [f for tensor, pieces in tensors for f in _fragments(tensor, pieces, optimizer.state[tensor])]
            )
    return course


def _fragments(tensor, fragments, state):
    block = 0
    for f in fragments:
        first, last = f.start // BLOCK, -(-(f.start + f.numel) // BLOCK)
        values = {"param": f.of(tensor), **{name: f.of(state[name]) for name in STATE[:2]}}
        values |= {name: state[name][block : block + last - first] for name in STATE[2:]}
        # Of numpy, because a queue shares the memory of tensors, which ends with the process.
        yield f.name, f.start, {name: value.cpu().numpy().copy() for name, value in values.items()}
        block += last - first
    assert block == state["exp_avg_scales"].numel()


def joined(ranks):
    """Full parameters, codes and scales of all ranks; pieces of one block must have equal scales."""
    full = {}
    for name, start, values in (fragment for rank in ranks for fragment in rank):
        numel = SIZES[name]
        for key, value in values.items():
            per_block = key in STATE[2:]
            begin = start // BLOCK if per_block else start
            value = torch.from_numpy(value)
            whole = full.setdefault(
                f"{name}.{key}", torch.zeros(-(-numel // BLOCK) if per_block else numel, dtype=value.dtype)
            )
            seen = full.setdefault(f"{name}.{key}.seen", torch.zeros(whole.shape, dtype=torch.bool))
            here = slice(begin, begin + len(value))
            assert torch.equal(whole[here][seen[here]].nan_to_num(-1), value[seen[here]].nan_to_num(-1)), (
                f"{name}.{key}"
            )
            whole[here], seen[here] = value, True
    assert all(value.all() for key, value in full.items() if key.endswith(".seen"))
    return full


CUTS = {"zero12": zero12, "zero3": zero3}


# Every pair of a number of ranks, a cut and an implementation; the nightly trials have every triple.
SHARDED = [
    (2, "zero12", "triton"), (3, "zero12", "reference"), (4, "zero12", "triton"),
    (2, "zero3", "reference"), (3, "zero3", "triton"), (4, "zero3", "reference"),
]  # fmt: skip
ALL_SHARDED = [*product((2, 3, 4), CUTS, BACKENDS)]


def _on_four_ranks(world, trials):
    """Trajectories of the first 2, 3 and all 4 ranks, by both cuts and implementations; and those with a NaN."""
    found = {}
    with patching_once():
        groups = {size: torch.distributed.new_group(list(range(size))) for size in (2, 3, 4)}
        for size, cut, backend in trials:
            if world.rank < size:
                found[size, cut, backend] = sharded(world.rank, size, groups[size], cut, backend, poisoned=False)[-1]
        for backend in BACKENDS:
            found[backend] = sharded(world.rank, 4, None, "zero3", backend, poisoned=True)[1:]
    return found


@pytest.fixture(scope="module")
def four_ranks(nightly):
    """On a CPU: four ranks do not fit on one GPU, which NCCL refuses."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CUDA_VISIBLE_DEVICES", "")
        environment.setenv("TRITON_INTERPRET", "1")
        return run_ranks(_on_four_ranks, ALL_SHARDED if nightly else SHARDED, ranks=4)


@pytest.fixture(scope="module")
def alone():
    return joined([sharded(0, 1, None, "zero12", "reference", poisoned=False)[-1]])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cut", CUTS)
def test_the_trajectory_does_not_depend_on_the_cut_into_ranks(alone, four_ranks, cut, backend, device, nightly):
    assert_same(joined([sharded(0, 1, None, cut, backend, poisoned=False, device=device)[-1]]), alone)
    for size, *way in ALL_SHARDED if nightly else SHARDED:
        if way == [cut, backend]:
            assert_same(joined([rank[size, cut, backend] for rank in four_ranks[:size]]), alone)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_poisons_its_block_on_all_ranks_and_nothing_else(four_ranks, backend):
    after, later = (joined([rank[backend][step] for rank in four_ranks]) for step in (0, 1))
    assert after["f.exp_avg_scales"].isnan().tolist() == [True, False, False, False]
    assert after["f.exp_avg_sq_scales"].isnan().tolist() == [True, False, False, False]
    assert after["f.param"].isnan().nonzero().tolist() == [[0]]
    assert later["f.param"][:BLOCK].isnan().all()
    assert later["f.param"][BLOCK:].isfinite().all()
    for name, values in later.items():
        assert name.startswith("f.") or not values.is_floating_point() or values.isfinite().all()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 1e30])
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_that_are_not_finite_stay_so(device, backend, value):
    blocks, moments = blocked(device)
    param = torch.zeros(NUMEL, device=device)
    for step in range(1, 4):
        grad = gradient(NUMEL, step).to(device)
        if step == 1:
            grad[[300, 3100]] = value
        adamw8bit(param, grad, moments, blocks, numbers(step), None, backend)
    assert not param[256:512].isfinite().any()
    assert not param[3067 : 3067 + 256].isfinite().any()
    assert param[:256].isfinite().all()
    assert (~moments.m_scales.isfinite() | ~moments.v_scales.isfinite()).sum() == 2


def test_straddling_blocks_are_those_of_which_ranks_hold_different_pieces(monkeypatch):
    def straddling(*layouts):
        monkeypatch.setattr(
            "fastdiff_kernels.adamw8bit.blocks._gather",
            lambda mine, group: [[*map(_pieces, layout)] for layout in layouts],
        )
        return find_straddling(layouts[0])

    from fastdiff_kernels.adamw8bit.blocks import _short_pieces

    def _pieces(slices):
        return list(_short_pieces(slices))

    whole = [[Fragment("p", 0, 1000, 0)]]
    assert straddling(whole, whole) == [[]]
    assert straddling([[Fragment("p", 0, 512, 0)]], [[Fragment("p", 512, 488, 0)]]) == [[]]
    assert straddling([[Fragment("p", 0, 500, 0)]], [[Fragment("p", 500, 500, 0)]]) == [[("p", 1)]]
    assert straddling([[Fragment("p", 0, 9, 0)]], [[]], [[Fragment("p", 9, 9, 5)]]) == [[("p", 0)]]
    assert straddling(whole, [[], *whole]) == [[]]  # as in the flat engine
    cut = [[Fragment("p", 0, 500, 0)]], [[Fragment("p", 500, 500, 0)]]
    with pytest.raises(ValueError, match=r"block 1 of 'p' straddles ranks, .* in the tensors \[0\] of \[1, 2\]"):
        straddling(cut[0], [*cut[1], []])
    with pytest.raises(ValueError, match=r"block 1 of 'p' straddles ranks, .* in the tensors \[0, 1\] of \[2, 2\]"):
        straddling([*cut[0], []], [[], *cut[1]])
    with pytest.raises(ValueError, match=r"block 1 of 'p' lies in two slices"):
        straddling([[Fragment("p", 0, 300, 0), Fragment("p", 300, 5, 300)]])


# The optimizer.


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 257), nn.GELU(), nn.Linear(257, 130), nn.GELU(), nn.Linear(130, 64))


def trained(make, steps=150):
    """Mean loss of the last steps and parameters of a small flow-matching model of the digits."""
    from sklearn.datasets import load_digits

    data = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    network, generator, losses = model(), torch.Generator().manual_seed(1), []
    optimizer = make(network.parameters(), lr=1e-3, weight_decay=0.01)
    for _ in range(steps):
        clean = data[torch.randint(0, len(data), (128,), generator=generator)]
        time, noise = torch.rand(128, 1, generator=generator), torch.randn(clean.shape, generator=generator)
        loss = functional.mse_loss(network((1 - time) * clean + time * noise), noise - clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-50:]) / 50, torch.cat([p.detach().flatten() for p in network.parameters()])


@pytest.mark.nightly
def test_training_follows_fp32_adamw_more_closely_than_bitsandbytes_does():
    import bitsandbytes

    def bitsandbytes_optimizer(parameters, **options):
        return bitsandbytes.optim.AdamW8bit(parameters, min_8bit_size=1, **options)

    loss, exact = trained(torch.optim.AdamW)
    ours, ours_at = trained(AdamW8bit)
    _, theirs_at = trained(bitsandbytes_optimizer)
    assert abs(ours / loss - 1) < 0.01
    assert (ours_at - exact).norm() < 0.75 * (theirs_at - exact).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_round_trips_to_the_bit(dtype):
    def advance(optimizer, p, steps):
        for step in steps:
            p.grad = gradient(NUMEL, step).to(dtype)
            optimizer.step()

    def made(values):
        p = nn.Parameter(values.clone())
        optimizer = AdamW8bit([{"params": [p], "lr": 1e-2}])
        optimizer.cut({p: LAYOUT})
        return optimizer, p

    optimizer, p = made(gradient(NUMEL, 99).to(dtype))
    advance(optimizer, p, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded, q = made(p.detach())
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for name in STATE:
        assert loaded.state[q][name].data_ptr() != optimizer.state[p][name].data_ptr()
    assert_same({n: loaded.state[q][n] for n in STATE}, {n: optimizer.state[p][n] for n in STATE})
    assert [loaded.state[q][name].dtype for name in STATE] == [torch.int8, torch.uint8, torch.float32, torch.float32]
    assert loaded.state[q]["step"] == 3
    advance(optimizer, p, range(3, 5))
    advance(loaded, q, range(3, 5))
    assert torch.equal(p, q)
    assert_same({n: loaded.state[q][n] for n in STATE}, {n: optimizer.state[p][n] for n in STATE})


def test_state_of_another_layout_is_refused():
    p = nn.Parameter(torch.zeros(1000))
    one, other = AdamW8bit([p]), AdamW8bit([p])
    p.grad = torch.ones_like(p)
    one.step()
    other.cut({p: [Fragment("p", 100, 1000, 0)]})
    with pytest.raises(ValueError, match=r"exp_avg_scales of tensor 0 is \(4,\), expected \(5,\).*another layout"):
        other.load_state_dict(one.state_dict())
    fresh = AdamW8bit([p])
    fresh.load_state_dict(AdamW8bit([p]).state_dict())
    assert not fresh.state[p]


def test_state_is_there_after_cut_and_has_at_most_2_1_bytes_per_parameter():
    p = nn.Parameter(torch.zeros(64 * BLOCK, 16))
    optimizer = AdamW8bit([p])
    optimizer.cut({p: [Fragment("p", 0, p.numel(), 0)]})
    state, blocks = optimizer.state[p], optimizer._blocks[p]
    assert state["step"] == 0
    assert blocks.phases.unique().numel() == blocks.pieces, "blocks are dithered differently"
    used = sum(state[name].nbytes for name in STATE) + sum(table.nbytes for table in _table(blocks))
    assert used == p.numel() * (2 + 24 / BLOCK)
    assert used / p.numel() <= 2.1


def test_tensors_of_any_shape_and_without_a_gradient_and_closures():
    a, b, empty = nn.Parameter(torch.ones(3, 5, 7)), nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(0, 3))
    optimizer = AdamW8bit([a, b, empty], lr=0.5, weight_decay=0)
    a.grad, empty.grad = torch.full_like(a, -2), torch.ones_like(empty)
    assert optimizer.step(lambda: 5) == 5
    torch.testing.assert_close(a, torch.full_like(a, 1.5))
    assert (b == 1).all()
    assert not optimizer.state[b]
    assert optimizer.state[empty]["exp_avg_scales"].shape == (0,)


def test_copies_and_averages_are_updated_in_the_same_pass():
    p = nn.Parameter(gradient(1000, 9))
    optimizer = AdamW8bit([p])
    optimizer.copies[p] = torch.zeros(10, 100, dtype=torch.float16)
    optimizer.averages[p] = ([torch.zeros(1000), torch.zeros(10, 100)], torch.tensor([0.25, 1.0]))
    p.grad = gradient(1000, 1)
    optimizer.step()
    assert torch.equal(optimizer.copies[p].flatten(), p.detach().half())
    slow, last = optimizer.averages[p][0]
    assert torch.equal(slow, 0.25 * p.detach())
    assert torch.equal(last.flatten(), p.detach())


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_parameters_keep_small_updates_on_average(device, backend):
    blocks, moments = blocked(device, 16 * BLOCK, [Fragment("p", 0, 16 * BLOCK, 0)])
    param = torch.ones(16 * BLOCK, dtype=torch.bfloat16, device=device)
    grad = torch.ones(16 * BLOCK, device=device)
    for step in range(1, 11):  # each of 1/64 of the distance between neighbours of bf16 below 1
        adamw8bit(param, grad, moments, blocks, numbers(step, 2.0**-14 / 1.1), None, backend)
    change = (1 - param.float()).mean().item()
    assert change == pytest.approx(10 * 2.0**-14, rel=0.2)


def test_stochastic_rounding_takes_a_neighbour_and_keeps_what_is_not_finite():
    value = gradient(4 * BLOCK, 1).view(4, BLOCK)
    value[0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.38e38])
    phase = torch.arange(4, dtype=torch.int32)[:, None]
    rounded = rounding.round_to_bf16_reference(value, phase, 1, 0)
    assert rounded[0, :3].tolist()[:2] == [torch.inf, -torch.inf]
    assert rounded[0, 2].isnan()
    rest = torch.arange(4 * BLOCK).view(4, BLOCK) > 3
    lower = value.view(torch.int32) & -65536
    up = (rounded.float().view(torch.int32) - lower)[rest]
    assert set(up.tolist()) == {0, 65536}
    place = ((value.view(torch.int32) & 65535) / 65536)[rest]
    assert up.double().mean().item() / 65536 == pytest.approx(place.mean().item(), abs=0.05)
    others = [
        rounding.round_to_bf16_reference(value, *key) for key in ((phase, 2, 0), (phase, 1, 1), (phase + 9, 1, 0))
    ]
    assert all((other != rounded)[rest].float().mean() > 0.2 for other in others)


# Torch, traffic, refusals.


def operands(device, straddling=()):
    blocks, moments = blocked(device, straddling=straddling)
    flats = [moments.m_codes, moments.v_codes, moments.m_scales, moments.v_scales]
    return blocks, gradient(NUMEL, 1).to(device), gradient(NUMEL, 2).to(device), flats


def test_the_ops_pass_opcheck(device):
    blocks, param, grad, flats = operands(device, [("behind", 5)])
    scale, values = torch.tensor(1.0, device=device), list(numbers().numbers)
    copied, average = torch.zeros(NUMEL, dtype=torch.bfloat16, device=device), torch.zeros(NUMEL, device=device)
    arguments = (grad, *flats, scale, _table(blocks), 1, values[:4])
    torch.library.opcheck(_largest_triton, arguments)
    shared = _largest_triton(*arguments)
    share, skip = torch.tensor([0.1], device=device), torch.tensor(False, device=device)
    step = on_device(numbers(), device)
    for extras, more in (
        ((copied, [average], share, scale, shared, skip), (step.number, step.numbers)),
        ((None, [], None, None, shared, None), (None, None)),
    ):
        arguments = (param, grad, *flats, *extras, _table(blocks), 1, 0, values, *more)
        torch.library.opcheck(_adamw8bit_triton, arguments)


def test_bytes_moved_are_those_of_the_docstring():
    if not launch.INTERPRETED:
        return
    from tests.support.benches import traffic

    numel = 64 * BLOCK
    blocks, moments = blocked("cpu", numel, [Fragment("p", 0, numel, 0)])
    param, grad = torch.zeros(numel), torch.ones(numel, dtype=torch.bfloat16)
    for extras, expected in (
        (Extras(copy=torch.zeros(numel).bfloat16()), 16),
        (
            Extras(averages=[param.clone(), param.clone()], shares=torch.zeros(2)),
            30,
        ),
    ):
        with traffic.counting() as moved:
            adamw8bit(param, grad, moments, blocks, numbers(), extras, "triton")
        # Of each block: two scales read and written, index, offset and phase read; two shares of 8 blocks.
        assert moved.bytes / numel == expected + (32 + len(extras.averages) * 4 / 8) / BLOCK


def refusal(**changed):
    blocks, moments = blocked("cpu", straddling=changed.pop("straddling", ()))
    values = {"param": torch.zeros(NUMEL), "grad": torch.zeros(NUMEL)} | changed
    moments = Moments(*(values.pop(n, getattr(moments, n)) for n in ("m_codes", "v_codes", "m_scales", "v_scales")))
    extras = Extras(
        **{n: values.pop(n) for n in ("grad_scale", "shared", "copy", "averages", "shares", "skip") if n in values}
    )
    for backend in BACKENDS:
        adamw8bit(values["param"], values["grad"], moments, blocks, numbers(), extras, backend)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"param": torch.zeros(NUMEL).half()}, r"param is torch.float16 .*expected torch.float32 or torch.bfloat16"),
        ({"grad": torch.zeros(9)}, r"grad is torch.float32 of shape \(9,\) on cpu, expected .* of shape \(5000,\)"),
        ({"grad": torch.zeros(NUMEL, device="meta")}, r"grad is .* on meta, expected .* on cpu"),
        ({"grad": torch.zeros(2 * NUMEL)[::2]}, r"grad .* has strides \(2,\), expected it to be contiguous; use"),
        ({"m_codes": torch.zeros(NUMEL, dtype=torch.uint8)}, "m_codes is torch.uint8 .*expected torch.int8"),
        ({"v_codes": torch.zeros(NUMEL, dtype=torch.int8)}, "v_codes is torch.int8 .*expected torch.uint8"),
        ({"m_scales": torch.zeros(3)}, r"m_scales .* shape \(3,\) on cpu, expected torch.float32 of shape \(20,\)"),
        ({"v_scales": torch.zeros(20).double()}, "v_scales is torch.float64"),
        ({"grad_scale": torch.ones(1)}, r"grad_scale .* shape \(1,\) on cpu, expected torch.float32 of shape \(\)"),
        ({"copy": torch.zeros(NUMEL, dtype=torch.int8)}, "copy is torch.int8"),
        ({"averages": [torch.zeros(NUMEL).half()]}, r"averages\[0\] is torch.float16"),
        ({"averages": [torch.zeros(NUMEL)]}, "1 averages without shares"),
        ({"skip": torch.zeros(1)}, "skip is torch.float32 of shape .* expected torch.bool or torch.float32 of shape"),
        ({"straddling": [("whole", 0)]}, "1 blocks straddle ranks, expected their shared scales"),
        ({"straddling": [("whole", 0)], "shared": torch.zeros(3, 2)}, r"shared .* expected .* shape \(1, 2\)"),
    ],
)
def test_refusals_say_what_was_given(changed, message):
    with pytest.raises(ValueError, match=message):
        refusal(**dict(changed))


def test_the_optimizer_refuses_what_it_cannot_do():
    p = nn.Parameter(torch.zeros(6, 4).t())
    for options in ({"lr": -1}, {"betas": (0.9, 1.0)}, {"eps": 0.0}, {"weight_decay": -1}, {"seed": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} .*expected lr >= 0"):
            AdamW8bit([p], **options)
    optimizer = AdamW8bit([p])
    p.grad = torch.zeros(4, 6)
    with pytest.raises(ValueError, match=r"shape \(4, 6\) has strides \(1, 4\), expected it to be contiguous"):
        optimizer.step()
    with pytest.raises(ValueError, match="lies outside of its tensor of 24 elements"):
        optimizer.cut({p: [Fragment("p", 0, 20, 5)]})


def test_largest_is_that_of_the_straddling_pieces_only(device):
    straddling = [("head", 4), ("not here", 0), ("odd", 0)]
    blocks, moments = blocked(device, straddling=straddling)
    grad = gradient(NUMEL, 1).to(device)
    found = [largest(grad, moments, blocks, numbers(), None, backend) for backend in BACKENDS]
    assert torch.equal(*found)
    head = slice(2048 + 1024 - 240, 2048 + 1008)  # block 4 of the parameter: elements 1024 to 1248
    for row, here in ((0, head), (2, slice(3060, 3067))):
        torch.testing.assert_close(found[0][row, 0], grad[here].abs().max() * 0.1)
    assert not found[0][1].any()
