"""Attention of short sequences: accuracy, bits, what is saved, compilation, refusals, and where it is chosen."""

import re
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from fastdiff.planning.gpus import of_device
from fastdiff_bench.correctness.accuracy import assert_as_accurate_as_eager, evaluate
from fastdiff_bench.instructions.gpus import GPUS
from fastdiff_bench.records import record
from fastdiff_bench.records.record import Measurement
from fastdiff_kernels import packed_attention as packed
from fastdiff_kernels import short_attention as module
from fastdiff_kernels.attention import Machine
from fastdiff_kernels.packed_attention import packed_attention, packed_choice
from fastdiff_kernels.short_attention import short_attention, short_attention_reference

H200 = Machine("cuda", (9, 0), 92000)


def qkv(length, head_dim, dtype, device, *, samples=1, heads=2, factor=1.0):
    generator = torch.Generator().manual_seed(length)
    values = factor * torch.randn(samples, length, 3, heads, head_dim, generator=generator)
    return {"qkv": values.to(device, dtype).requires_grad_()}


def upstream(given):
    samples, length, _, heads, head_dim = given["qkv"].shape
    generator = torch.Generator().manual_seed(1)
    shape = (samples, length, heads * head_dim)
    return [torch.randn(shape, generator=generator).to(given["qkv"].device, given["qkv"].dtype)]


@pytest.mark.parametrize(
    ("length", "head_dim", "dtype", "samples", "heads"),
    [
        (2, 72, torch.float32, 1, 2),
        (17, 64, torch.float16, 3, 1),
        (64, 80, torch.bfloat16, 1, 2),
        (65, 64, torch.float16, 1, 1),
        (77, 64, torch.bfloat16, 1, 2),
        (100, 72, torch.bfloat16, 1, 2),
        (128, 72, torch.bfloat16, 1, 1),
        (40, 80, torch.float32, 1, 2),
        pytest.param(196, 80, torch.float16, 1, 2, marks=pytest.mark.nightly),
        pytest.param(256, 72, torch.bfloat16, 1, 2, marks=pytest.mark.nightly),
        pytest.param(256, 64, torch.float32, 1, 2, marks=pytest.mark.nightly),
    ],
)
def test_as_accurate_as_eager(length, head_dim, dtype, samples, heads, device):
    given = qkv(length, head_dim, dtype, device, samples=samples, heads=heads)
    assert_as_accurate_as_eager(short_attention, short_attention_reference, given, upstream(given))
    given["bias"] = torch.zeros(3 * heads * head_dim, dtype=dtype, device=device, requires_grad=True)
    assert_as_accurate_as_eager(short_attention, short_attention_reference, given, upstream(given), sums={"dbias"})


@pytest.mark.parametrize("capability", module.BLOCKS, ids="sm_{}".format)
@pytest.mark.parametrize("length", [150, pytest.param(256, marks=pytest.mark.nightly)])
def test_as_accurate_as_eager_by_the_blocks_of_every_gpu(capability, length, monkeypatch, device):
    """Of more than one block of keys the later add to what the earlier wrote in 16 bits."""
    monkeypatch.setattr(module, "architecture", lambda _: capability)
    given = qkv(length, 72, torch.bfloat16, device, heads=1)
    given["bias"] = torch.zeros(3 * 72, dtype=torch.bfloat16, device=device, requires_grad=True)
    assert_as_accurate_as_eager(short_attention, short_attention_reference, given, upstream(given), sums={"dbias"})


def test_a_gpu_takes_the_blocks_of_the_newest_that_is_not_newer():
    blocks = module.BLOCKS
    assert [*blocks] == sorted(blocks, reverse=True)
    assert [module.blocks_of(capability) for capability in (80, 86, 90, 120)] == [
        blocks[known] for known in (80, 80, 90, 100)
    ]


def test_the_sum_of_the_gradients_of_keys_is_zero(device):
    given = qkv(20, 64, torch.float32, device, samples=3)
    given["bias"] = torch.zeros(3 * 2 * 64, device=device, requires_grad=True)
    found = evaluate(short_attention, given, upstream(given))
    assert not found["dbias"].view(3, 2, 64)[1].any()
    torch.testing.assert_close(found["dbias"], found["dqkv"].sum((0, 1)).flatten(), atol=1e-4, rtol=1e-4)


def test_large_scores_cost_no_accuracy_and_overflow_nothing(device):
    """Against torch's fused kernel, which also differentiates through the log-sum-exp, rounded relative to its size."""

    def fused(qkv):
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)

    given = qkv(40, 64, torch.float32, device, heads=1, factor=12.0)
    assert_as_accurate_as_eager(short_attention, fused, given, upstream(given))
    low = given["qkv"].detach().abs()
    low[:, :, 0] *= -1  # every score is far below 0, that of padding, whose exp(0 - lse) overflows
    given = {"qkv": low.requires_grad_()}
    assert_as_accurate_as_eager(short_attention, fused, given, upstream(given))


def test_one_token_is_its_own_value(device):
    given = qkv(1, 64, torch.float32, device)
    results = evaluate(short_attention, given, upstream(given))
    torch.testing.assert_close(results["out0"], given["qkv"].detach()[:, :, 2].flatten(2))
    assert results["dqkv"][:, :, :2].abs().max() < 1e-5


def test_the_reference_is_differentiated_correctly():
    given = torch.randn(1, 3, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(short_attention_reference, (given,))


def test_two_runs_agree_to_the_bit_and_samples_do_not_see_each_other(device):
    both = qkv(20, 72, torch.float16, device, samples=2, heads=1)
    seeds = upstream(both)
    first, second = (evaluate(short_attention, both, seeds) for _ in range(2))
    alone = {"qkv": both["qkv"].detach()[1:].requires_grad_()}
    third = evaluate(short_attention, alone, [seeds[0][1:]])
    for name in first:
        assert torch.equal(first[name], second[name])
        assert torch.equal(first[name][1:], third[name])


def test_a_number_that_is_not_finite_spoils_its_head_only(device):
    given = qkv(18, 64, torch.float32, device)
    with torch.no_grad():
        given["qkv"][0, 3, 1, 0, 5] = torch.nan
    results = evaluate(short_attention, given, upstream(given))
    assert results["out0"][..., :64].isnan().all()
    assert results["out0"][..., 64:].isfinite().all()
    assert results["dqkv"][:, :, :, 1].isfinite().all()


def test_only_the_log_sum_exp_is_saved_beside_input_and_output(device):
    saved = []
    given = qkv(20, 80, torch.bfloat16, device)["qkv"]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor), lambda _: None):
        out = short_attention(given)
    held = {given.data_ptr(), out.data_ptr()}
    assert held < {tensor.data_ptr() for tensor in saved}
    assert [(t.dtype, t.shape) for t in saved if t.data_ptr() not in held] == [(torch.float32, (1, 2, 20))]


def test_the_gradient_is_one_contiguous_tensor_for_any_strides(device):
    given = qkv(5, 64, torch.float32, device)
    apart = {"qkv": given["qkv"].detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()}
    seed = upstream(given)[0].transpose(0, 1).contiguous().transpose(0, 1)
    expected, found = (evaluate(short_attention, g, [seed]) for g in (given, apart))
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    out = short_attention(apart["qkv"])
    (raw,) = torch.autograd.grad(out, apart["qkv"], seed)
    assert out.is_contiguous()
    assert raw.is_contiguous()


def test_custom_ops_are_sound_and_one_node_each_under_compile(device):
    given, graphs = qkv(20, 64, torch.float32, device)["qkv"], []

    def keep(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if "fastdiff" in str(node.target)])
        return graph

    compiled = torch.compile(packed_attention, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    out = compiled(given, backend="short")
    assert torch.equal(out, short_attention(given))
    out.sum().backward()
    assert graphs == [["fastdiff.short_attention.default"], ["fastdiff.short_attention_backward.default"]]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(module._short_attention_triton, (given, given.new_zeros(384)), test_utils=checks)
    out, lse = module._short_attention_triton(given.detach(), None)
    for sums in (False, True):
        arguments = (out, out, lse, given.detach(), sums)
        torch.library.opcheck(module._short_attention_backward_triton, arguments, test_utils=checks)


def test_no_samples_give_an_empty_output(device):
    given = qkv(8, 64, torch.float32, device, samples=0)
    results = evaluate(short_attention, given, upstream(given))
    assert results["out0"].shape == (0, 8, 128)
    assert results["dqkv"].shape == (0, 8, 3, 2, 64)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(2, 8, 2, 1, 64), r"shape \(2, 8, 2, 1, 64\), expected \[B, T, 3, H, D\]"),
        (torch.zeros(2, 8, 3, 64), r"expected \[B, T, 3, H, D\]"),
        (torch.zeros(1, 8, 3, 1, 40), "takes head dims 64, 72, 80, this is 40; use short_attention_reference"),
        (torch.zeros(1, 257, 3, 1, 64), "takes 1 to 256 tokens, these are 257"),
        (torch.zeros(1, 0, 3, 1, 64), "takes 1 to 256 tokens, these are 0"),
        (torch.zeros(1, 8, 3, 1, 64).double(), "qkv is torch.float64, expected bfloat16, float16 or float32"),
    ],
)
def test_refusals_say_what_was_given(given, message):
    with pytest.raises(ValueError, match=message):
        short_attention(given)


def test_a_bias_of_another_width_or_dtype_is_refused():
    for bias in (torch.zeros(64), torch.zeros(192, dtype=torch.float16)):
        with pytest.raises(ValueError, match=r"expected \(192,\) torch.float32, the channels and dtype of qkv"):
            short_attention(torch.zeros(1, 8, 3, 1, 64), bias)


# --- where it is chosen ---


@pytest.mark.parametrize(
    ("backend", "dtype", "here", "why"),
    [
        ("short", torch.float32, Machine("cpu"), "asked for"),
        ("auto", torch.bfloat16, H200, None),
        ("auto", torch.bfloat16, H200._replace(deterministic=True), "adds in a fixed order"),
        ("auto", torch.float32, H200._replace(deterministic=True), None),
        ("auto", torch.bfloat16, Machine("cuda", (7, 5), 92000, deterministic=True), None),
        ("auto", torch.bfloat16, Machine("cpu"), None),
        ("flash", torch.bfloat16, H200._replace(deterministic=True), None),
    ],
)
def test_where_it_is_chosen(backend, dtype, here, why):
    assert packed._why_short(backend, dtype, 256, 72, here) == why


def test_what_auto_takes_on_a_gpu_is_tried(monkeypatch):
    def fails(qkv, bias=None):
        raise OSError("no compiler")

    monkeypatch.setattr(packed, "machine", lambda device, backend: H200._replace(deterministic=True))
    monkeypatch.setattr(packed, "short_attention", fails)
    with pytest.raises(RuntimeError, match="failed when tried: no compiler; use 'sdpa'"):
        packed_choice(72, 23, torch.zeros(0, dtype=torch.bfloat16))


def test_the_backward_pass_takes_any_strides(device):
    given, (dout,) = qkv(5, 64, torch.float32, device), upstream(qkv(5, 64, torch.float32, device))
    packed_qkv = given["qkv"].detach()
    out, lse = torch.ops.fastdiff.short_attention(packed_qkv, None)
    backward = torch.ops.fastdiff.short_attention_backward
    strided = [value.mT.contiguous().mT for value in (dout, out, lse)]
    assert not any(value.is_contiguous() for value in strided)
    found, expected = (backward(*given, packed_qkv, True) for given in (strided, (dout, out, lse)))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_auto_takes_what_is_measured_fastest_and_nothing_near_it(monkeypatch):
    monkeypatch.setattr(packed, "FASTEST", frozenset({((9, 0), 256, 72)}))
    assert packed._why_short("auto", torch.bfloat16, 256, 72, H200) == "measured fastest"
    for length, head_dim, here in ((256, 64, H200), (64, 72, H200), (256, 72, H200._replace(capability=(10, 0)))):
        assert packed._why_short("auto", torch.bfloat16, length, head_dim, here) is None


def fastest(records):
    """Tokens and head dims at which the newest of the records that has them has ``short`` fastest, both ways together.

    ``auto`` is one of the others, and a provider without a time for each way has none for both.
    """
    newest = {}
    for one in sorted(records, key=lambda one: one.fingerprint.date):
        times = defaultdict(lambda: defaultdict(dict))
        for m in one.measurements:
            shape = re.match(r"attention \S+-\d+x(\d+)x(\d+)-self bfloat16 (forward|backward)$", m.case)
            if shape and (m.bench, m.quantity) == ("op", "time") and m.provider != "auto":
                times[int(shape[1]), int(shape[2])][m.provider][shape[3]] = m.value
        for key, by_provider in times.items():
            newest[key] = {name: sum(ways.values()) for name, ways in by_provider.items() if len(ways) == 2}
    return {key for key, times in newest.items() if times and min(times, key=times.get) == "short"}


def measured(provider, forward, backward):
    given = {"bench": "op", "provider": provider, "quantity": "time", "unit": "us", "better": "lower"}
    ways = {"forward": forward, "backward": backward}
    return [
        Measurement(case=f"attention dit-xl-16x256x72-self bfloat16 {way}", value=value, **given)
        for way, value in ways.items()
    ]


def of_day(day, measurements):
    return SimpleNamespace(measurements=measurements, fingerprint=SimpleNamespace(date=f"2026-11-{day:02}"))


def test_auto_takes_only_what_a_committed_record_has_fastest():
    cudnn = measured("cudnn", 2.0, 3.0)
    slow = of_day(1, [*measured("short", 1.0, 5.0), *cudnn])
    fast = of_day(2, [*measured("auto", 2.0, 2.0), *measured("short", 2.5, 2.0), *cudnn])
    assert fastest([slow]) == set()
    assert fastest([fast, slow]) == {(256, 72)}, "the newest, of which auto is none of the others"
    assert fastest([of_day(3, slow.measurements), fast]) == set()
    assert fastest([of_day(1, [measured("short", 1.0, 5.0)[0], *cudnn])]) == set(), "forward alone"
    kept = record.read_all([record.RESULTS])
    for (major, minor), length, head_dim in packed.FASTEST:
        of_gpu = [one for one in kept if of_device(one.fingerprint.device) is GPUS[10 * major + minor]]
        assert (length, head_dim) in fastest(of_gpu)


@pytest.mark.parametrize(
    ("dtype", "here", "triton", "why"),
    [
        (torch.bfloat16, H200, True, None),
        (torch.bfloat16, H200, False, "needs Triton, which is not installed"),
        (torch.bfloat16, Machine("cuda", (7, 5)), True, "needs sm_80 or newer, this device is sm_75"),
        (torch.float64, H200, True, "computes in bf16, fp16 and fp32, the tensors are float64"),
    ],
)
def test_machines(dtype, here, triton, why):
    assert packed.short_problem(dtype, here, triton=triton) == why


def test_without_a_gpu_and_the_interpreter_it_is_refused(monkeypatch):
    monkeypatch.setattr(packed.launch, "INTERPRETED", False)
    message = "attention backend 'short': needs a CUDA device, the tensors are on cpu; use 'auto'"
    with pytest.raises(RuntimeError, match=message):
        packed_attention(torch.zeros(1, 8, 3, 1, 64), backend="short")
    with pytest.raises(RuntimeError, match=message):
        packed_choice(64, 8, torch.zeros(0), "short")


def test_what_it_does_not_take_falls_back(device):
    example = torch.empty(0, device=device)
    assert packed_choice(64, 8, example, "short").forward == "short"
    for why, arguments in {
        "short takes head dims 64, 72, 80, this is 40": (40, 8),
        "short takes 1 to 256 tokens, these are 1024": (64, 1024),
    }.items():
        found = packed_choice(*arguments, example, "short")
        assert found.forward.startswith("sdpa (")
        assert found.why == why
    found = packed_choice(64, 8, example, "short", contiguous=False)
    assert (found.forward[:4], found.why) == ("sdpa", "short takes a contiguous packed projection")


@pytest.mark.parametrize("head_dim", [40, 64])
@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference", "short"])
def test_packed_attention_is_attention_of_the_parts(backend, head_dim, device):
    given = qkv(9, head_dim, torch.float32, device, samples=2)
    strided = {"qkv": given["qkv"].detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()}
    for one in (given, strided):
        found = evaluate(lambda qkv: packed_attention(qkv, backend=backend), one, upstream(given))
        expected = evaluate(short_attention_reference, given, upstream(given))
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name])


def test_packed_attention_refuses_another_shape():
    with pytest.raises(ValueError, match=re.escape("qkv has shape (1, 3, 2, 2, 4), expected [B, T, 3, H, D]")):
        packed_attention(torch.zeros(1, 3, 2, 2, 4))
