"""Attention: every backend against fp64, the choice of the backend, and refusals."""

import re
import sys
from types import ModuleType
from unittest import mock

import pytest
import torch
from torch.nn.attention import SDPBackend

from fastdiff_bench.correctness.accuracy import assert_as_accurate_as_eager
from fastdiff_kernels import attention as module
from fastdiff_kernels.attention import Machine, attention, attention_reference, choice, reasons

HEAD_DIMS = (40, 64, 72, 80, 160)
KEYS = (None, 77)
"""Self-attention, and cross-attention with CLIP's 77 tokens."""
HALF = (torch.bfloat16, torch.float16)
FUSED = torch.nn.functional.scaled_dot_product_attention
"""Eager PyTorch in fp32: its fused kernels differentiate through the stored log-sum-exp, not through the softmax."""

CPU = Machine("cpu")
A100 = Machine("cuda", (8, 0), 92000, xformers=None)
H200 = Machine("cuda", (9, 0), 92000, xformers=None)
B200 = Machine("cuda", (10, 0), 92000, xformers=None)


def inputs(head_dim, keys, dtype, device, *, queries=48, heads=2, batch=2):
    """Views of packed projections, as the models make them."""
    torch.manual_seed(head_dim)
    shape = (3, heads, head_dim)
    packed = torch.randn(batch, queries, *shape, device=device).to(dtype)
    query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
    if keys is not None:
        key, value = torch.randn(batch, keys, 2, *shape[1:], device=device).to(dtype).permute(2, 0, 3, 1, 4).unbind(0)
    tensors = {"query": query, "key": key, "value": value}
    return {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}


def upstream(given):
    """Not contiguous, as the output projection hands it back."""
    batch, heads, length, head_dim = given["query"].shape
    return [torch.randn(batch, length, heads, head_dim, device=given["query"].device).transpose(1, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("backend", ["sdpa", "auto"])
def test_no_worse_than_eager(backend, head_dim, keys, dtype, device):
    given = inputs(head_dim, keys, dtype, device)
    seeds = [u.to(dtype) for u in upstream(given)]
    eager = FUSED if dtype is torch.float32 else attention_reference
    assert_as_accurate_as_eager(lambda **k: attention(**k, backend=backend), eager, given, seeds)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("backend", ["cudnn", "flash", "xformers"])
def test_no_worse_than_eager_where_forced(backend, head_dim, keys, dtype):
    given = inputs(head_dim, keys, dtype, "cuda", queries=256, heads=4)
    here = module.machine(torch.device("cuda", 0), backend)
    why = reasons(backend, dtype, head_dim, 256, keys or 256, here)
    if why:
        with pytest.raises(RuntimeError, match="attention backend"):
            attention(**given, backend=backend)
        return

    def forced(**tensors):
        torch.use_deterministic_algorithms(True, warn_only=True)  # cuDNN refuses to run without the second
        return attention(**tensors, backend=backend)

    seeds = [u.to(dtype) for u in upstream(given)]
    assert_as_accurate_as_eager(forced, attention_reference, given, seeds)


@pytest.mark.gpu
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_chosen_backend_is_the_one_that_runs(head_dim, keys):
    from torch.profiler import ProfilerActivity, profile

    given = inputs(head_dim, keys, torch.bfloat16, "cuda", queries=256)
    named = choice(head_dim, 256, keys or 256, given["query"]).forward
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        attention(**given)
    ran = {event.key for event in recorded.key_averages()}
    ops = {"sdpa (cudnn)": "cudnn", "sdpa (flash)": "flash", "sdpa (memory-efficient)": "efficient"}
    assert f"aten::_scaled_dot_product_{ops[named]}_attention" in ran


def test_the_reference_is_differentiated_correctly():
    given = inputs(8, 5, torch.float64, "cpu", queries=3, batch=1)
    assert torch.autograd.gradcheck(attention_reference, tuple(given.values()))


def test_one_query_one_key_and_prime_lengths(device):
    for queries, keys in ((1, 1), (1, 13), (13, 1), (13, 7)):
        given = inputs(24, keys, torch.float32, device, queries=queries)
        assert_as_accurate_as_eager(attention, FUSED, given, upstream(given))


@pytest.mark.parametrize("backend", ["auto", "sdpa", "short", "reference"])
def test_one_graph(backend, device):
    given = inputs(16, None, torch.float32, device)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    expected, got = attention(**given, backend=backend), compiled(**given, backend=backend)
    assert torch.equal(got, expected)
    seed = upstream(given)[0]
    for ours, theirs in zip(
        *(torch.autograd.grad(out, list(given.values()), seed) for out in (got, expected)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


# --- which backend ---


@pytest.mark.parametrize(
    ("here", "head_dim", "keys", "dtype", "first"),
    [
        (H200, 72, 256, torch.bfloat16, SDPBackend.CUDNN_ATTENTION),
        (H200, 160, 77, torch.float16, SDPBackend.CUDNN_ATTENTION),
        (H200._replace(cudnn=91400), 40, 77, torch.bfloat16, SDPBackend.FLASH_ATTENTION),
        (H200._replace(cudnn=91400), 40, 256, torch.bfloat16, SDPBackend.CUDNN_ATTENTION),
        (H200._replace(cudnn=0), 64, 256, torch.bfloat16, SDPBackend.FLASH_ATTENTION),
        (H200._replace(deterministic=True), 64, 256, torch.bfloat16, SDPBackend.FLASH_ATTENTION),
        (H200._replace(deterministic=True), 64, 256, torch.float32, SDPBackend.EFFICIENT_ATTENTION),
        (B200._replace(deterministic=True), 80, 77, torch.bfloat16, SDPBackend.FLASH_ATTENTION),
        (H200, 36, 256, torch.bfloat16, SDPBackend.FLASH_ATTENTION),
        (H200, 512, 256, torch.bfloat16, SDPBackend.EFFICIENT_ATTENTION),
        (H200, 64, 256, torch.float32, SDPBackend.EFFICIENT_ATTENTION),
        (B200, 80, 77, torch.bfloat16, SDPBackend.CUDNN_ATTENTION),
        (B200, 160, 64, torch.bfloat16, SDPBackend.FLASH_ATTENTION),
        *((A100, d, k, torch.bfloat16, SDPBackend.FLASH_ATTENTION) for d in HEAD_DIMS for k in (77, 256)),
        (Machine("cuda", (8, 9), 92000), 64, 256, torch.float16, SDPBackend.FLASH_ATTENTION),
        (Machine("cuda", (12, 0), 92000), 64, 256, torch.bfloat16, SDPBackend.FLASH_ATTENTION),
        (Machine("cuda", (7, 5), 92000), 64, 256, torch.float16, SDPBackend.EFFICIENT_ATTENTION),
    ],
)
def test_auto_prefers(here, head_dim, keys, dtype, first):
    order = module._order("auto", (dtype, head_dim, 256, keys, here))
    assert order[0] is first
    assert order[-1] is SDPBackend.MATH  # so that it always runs


@pytest.mark.parametrize(
    ("backend", "here", "change", "why"),
    [
        *((b, CPU, {}, "needs a CUDA device, the tensors are on cpu") for b in ("cudnn", "flash", "xformers")),
        *(
            (b, Machine("cuda", (7, 5), 92000, xformers=None), {}, "needs sm_80 or newer, this device is sm_75")
            for b in ("cudnn", "flash", "xformers")
        ),
        *(
            (b, H200, {"dtype": torch.float32}, "computes in fp16 and bf16, the tensors are float32")
            for b in ("cudnn", "flash")
        ),
        ("xformers", H200, {"dtype": torch.float32}, None),
        ("xformers", B200, {"dtype": torch.float32}, "the tensors are float32 on sm_100"),
        ("xformers", H200._replace(xformers="its operators do not load"), {}, "^its operators do not load$"),
        ("xformers", H200, {"head_dim": 44}, "multiples of 8 up to 256, this is 44"),
        ("flash", H200, {"head_dim": 264}, "up to 256, this is 264"),
        ("flash", H200, {"head_dim": 36}, None),
        ("cudnn", H200._replace(cudnn=0), {}, "has no cuDNN"),
        *((b, H200._replace(deterministic=True), {}, "is not deterministic") for b in ("cudnn", "xformers")),
        *((b, H200._replace(deterministic=True), {}, None) for b in ("flash", "sdpa", "reference", "auto")),
        ("cudnn", H200, {"head_dim": 256}, None),
        ("cudnn", H200, {"head_dim": 264}, "up to 256 on sm_90, this is 264"),
        ("cudnn", H200._replace(cudnn=90800), {"head_dim": 160}, "up to 128 on sm_90, this is 160"),
        ("cudnn", A100, {"head_dim": 160}, "up to 128 on sm_80, this is 160"),
        ("cudnn", B200, {"head_dim": 160}, "up to 128 on sm_100, this is 160"),
        ("cudnn", H200, {"head_dim": 36}, "multiples of 8"),
        ("cudnn", H200, {"key_length": 1}, "a single key"),
        ("cudnn", H200._replace(cudnn=91400), {"key_length": 77}, r"needs cuDNN 9\.15\.1 for lengths 256 x 77"),
        ("cudnn", H200._replace(cudnn=91400), {"query_length": 200}, r"needs cuDNN 9\.15\.1 for lengths 200 x 256"),
        ("cudnn", H200._replace(cudnn=91400), {}, None),
        *((b, H200, {"head_dim": d}, None) for b in ("cudnn", "flash", "xformers") for d in HEAD_DIMS),
        *((b, CPU, {"dtype": torch.float64}, None) for b in ("auto", "sdpa", "reference")),
    ],
)
def test_reasons(backend, here, change, why):
    case = {"dtype": torch.bfloat16, "head_dim": 64, "query_length": 256, "key_length": 256, **change}
    got = reasons(backend, here=here, **case)
    if why is None:
        assert got is None
    else:
        assert got is not None
        assert re.search(why, got), got


def test_choice_on_this_machine(device):
    example = torch.empty(0, device=device)
    for backend in ("auto", "sdpa"):
        chosen = choice(64, 256, 77, example, backend)
        assert chosen.op == "attention"
        assert chosen.forward == chosen.backward
        assert chosen.forward.startswith("sdpa (")
    assert choice(64, 256, 77, example, "reference").forward == "reference"
    fallen_back = choice(64, 64, 64, example, "short")
    assert fallen_back.forward == choice(64, 64, 64, example).forward
    assert fallen_back.why == "short takes a packed projection"


@pytest.mark.parametrize("backend", ["cudnn", "flash", "xformers"])
def test_forced_backends_are_refused_on_a_cpu_with_the_reason(backend):
    given = inputs(64, None, torch.bfloat16, "cpu")
    message = f"attention backend '{backend}': needs a CUDA device, the tensors are on cpu; use 'auto'"
    with pytest.raises(RuntimeError, match=message):
        attention(**given, backend=backend)
    with pytest.raises(RuntimeError, match=message):
        choice(64, 48, 48, given["query"], backend)


@pytest.fixture
def pretended(monkeypatch):
    """CPU tensors are taken for those of an H200, and torch's flash kernel is the one for CPUs."""
    monkeypatch.setattr(module, "machine", torch.compiler.assume_constant_result(lambda device, backend: H200))
    return monkeypatch


def test_a_forced_kernel_and_no_other_runs_also_under_compile(pretended):
    given = inputs(64, None, torch.bfloat16, "cpu")
    pretended.setitem(module._TORCH, "flash", SDPBackend.MATH)  # differs from what torch would choose
    for run in (attention, torch.compile(attention, fullgraph=True, backend="aot_eager")):
        forced = run(**given, backend="flash")
        assert not torch.equal(forced, run(**given, backend="sdpa"))
        forced.sum().backward()
    assert choice(64, 48, 48, given["query"], "flash").forward == "sdpa (flash)"


def test_a_backend_that_torch_refuses_is_refused_at_once_and_skipped_by_auto(pretended):
    given = inputs(64, None, torch.bfloat16, "cpu")  # there is no cuDNN for CPU tensors
    with pytest.raises(RuntimeError, match=r"attention backend 'cudnn': failed when tried: .*; use 'auto'"):
        choice(64, 48, 48, given["query"], "cudnn")
    assert choice(64, 48, 48, given["query"]).forward == "sdpa (flash)"
    for run in (attention, torch.compile(attention, fullgraph=True, backend="aot_eager")):
        assert torch.equal(run(**given), attention(**given, backend="sdpa"))


def test_auto_says_what_it_passed_over(pretended):
    example = torch.empty(0, dtype=torch.bfloat16)
    assert choice(64, 48, 48, example).why == "first choice on sm_90"
    assert (
        "cudnn takes head dims that are multiples of 8 up to 256 on sm_90, this is 36" in choice(36, 9, 9, example).why
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 8, 4)}, r"shapes \(2, 8, 4\), .* expected \[B, H, T, D\]"),
        ({"value": torch.zeros(1, 2, 9, 8)}, r"\(1, 2, 9, 8\), expected \[B, H, T, D\] and twice"),
        ({"query": torch.zeros(1, 3, 5, 8)}, "the same B, H and head_dim"),
        ({"query": torch.zeros(1, 2, 5, 16)}, "the same B, H and head_dim"),
        (
            {"query": torch.zeros(1, 2, 5, 8).half()},
            "float16 on cpu, float32 on cpu, float32 on cpu, expected one dtype",
        ),
        (
            {"backend": "fa3"},
            "'fa3': expected one of auto, sdpa, cudnn, flash, xformers, short, reference",
        ),
    ],
)
def test_refusals_say_what_was_given(change, message):
    tensors = {"query": torch.zeros(1, 2, 5, 8), "key": torch.zeros(1, 2, 7, 8), "value": torch.zeros(1, 2, 7, 8)}
    with pytest.raises(ValueError, match=message):
        attention(**(tensors | change))


def test_choice_refuses_what_does_not_exist():
    with pytest.raises(ValueError, match="attention backend 'fa3'"):
        choice(64, 8, 8, torch.empty(0), "fa3")


# --- xformers ---


@pytest.fixture
def stand_in(pretended):
    """Functions with the signature and the layouts of xformers', on a CPU."""

    def forward(query, key, value):
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        scores = (q @ k.transpose(-2, -1)).float() * q.shape[-1] ** -0.5
        lse = torch.nn.functional.pad(scores.logsumexp(-1), (0, -q.shape[2] % 32), value=torch.inf)
        return attention_reference(q, k, v).transpose(1, 2), lse

    def backward(grad, output, lse, query, key, value):
        assert grad.is_contiguous()
        assert lse.shape == (query.shape[0], query.shape[2], query.shape[1])
        q, k, v, d, o = (t.transpose(1, 2).float() for t in (query, key, value, grad, output))
        p = ((q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5 - lse[..., None]).exp()
        ds = p * (d @ v.transpose(-2, -1) - (d * o).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        return tuple(
            t.transpose(1, 2).to(query.dtype) for t in (ds @ k, ds.transpose(-2, -1) @ q, p.transpose(-2, -1) @ d)
        )

    fmha = ModuleType("xformers.ops.fmha")
    fmha.memory_efficient_attention_forward_requires_grad = forward
    fmha.memory_efficient_attention_backward = backward
    for name in ("xformers", "xformers.ops"):
        pretended.setitem(sys.modules, name, ModuleType(name))
    pretended.setitem(sys.modules, "xformers.ops.fmha", fmha)
    return fmha


@pytest.mark.parametrize("keys", KEYS)
def test_xformers_gets_the_layout_that_it_takes(keys, stand_in):
    given = inputs(40, keys, torch.bfloat16, "cpu")
    seeds = [u.bfloat16() for u in upstream(given)]
    assert_as_accurate_as_eager(lambda **k: attention(**k, backend="xformers"), attention_reference, given, seeds)
    assert choice(40, 48, keys or 48, given["query"], "xformers").backward == "xformers"


def test_xformers_is_one_opaque_node(stand_in):
    given = inputs(40, 77, torch.float32, "cpu")
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    out = compiled(**given, backend="xformers")
    assert torch.equal(out, attention(**given, backend="xformers"))
    out.sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in given.values())
    packed = [tensor.transpose(1, 2) for tensor in inputs(40, 77, torch.float32, "cpu").values()]
    torch.library.opcheck(module._xformers, packed)
    out, lse = module._xformers(*(tensor.detach() for tensor in packed))
    torch.library.opcheck(module._xformers_backward, (out, out, lse, *(tensor.detach() for tensor in packed)))


def test_a_failing_xformers_is_refused_at_the_start(stand_in):
    def broken(*_):
        raise NotImplementedError("no operator found")

    stand_in.memory_efficient_attention_forward_requires_grad = broken
    with pytest.raises(RuntimeError, match="attention backend 'xformers': failed when tried: no operator found"):
        choice(40, 48, 48, torch.empty(0, dtype=torch.bfloat16), "xformers")


FAILED = """
import logging, warnings
logging.getLogger("xformers").warning("WARNING[XFORMERS]: xFormers can't load C++/CUDA extensions")
warnings.warn("and this")
class Build:
    torch_version, cuda_version = "2.10.0+cu128", 1208
class Failure(Exception):
    build_info = {}
_cpp_library_load_exception = Failure()
"""
XFORMERS = {
    "_cpp_library_load_exception = None": "None",
    FAILED.format(
        "Build()"
    ): "the operators of xformers 0.0.99 are built for torch 2.10.0+cu128 (CUDA 12.8) and do not load in torch",
    FAILED.format("None"): "xformers 0.0.99 has no operators for torch",
    "raise OSError('libcudart.so.12: cannot open')": "xformers cannot be imported (libcudart.so.12: cannot open)",
}
"""Content of xformers' module of its compiled library, in its own terms, and what is found."""


@pytest.mark.parametrize("content", XFORMERS)
def test_xformers_counts_only_if_its_operators_load(content, tmp_path, monkeypatch, capfd):
    """Its package imports without them. Nothing is printed: it logs and warns at its import."""
    (tmp_path / "xformers").mkdir()
    (tmp_path / "xformers" / "__init__.py").touch()
    (tmp_path / "xformers" / "_cpp_lib.py").write_text(content)
    (tmp_path / "xformers-0.0.99.dist-info").mkdir()
    (tmp_path / "xformers-0.0.99.dist-info" / "METADATA").write_text("Name: xformers\nVersion: 0.0.99\n")
    monkeypatch.syspath_prepend(tmp_path)
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.split(".")[0] == "xformers"]:
            del sys.modules[name]  # that of this machine
        assert str(module.xformers_problem.__wrapped__()).startswith(XFORMERS[content])
    assert capfd.readouterr() == ("", "")
