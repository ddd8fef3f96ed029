"""Breakdown of traces: one of a real run on a CPU, and one in the form of a GPU's with known times."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from fastdiff.training.profiling.recording import trace_path
from fastdiff_bench import BenchError
from fastdiff_bench.tracing.breakdown import break_down
from fastdiff_bench.tracing.classes import IDLE, of_kernel, of_operator
from fastdiff_bench.tracing.events import parse, read
from tests.support.runs import launch, tiny


def test_the_trace_of_a_run_adds_up(world: World, digits: Path, tmp_path: Path) -> None:
    """Every class of the network has time, no more than the wall time in all; every phase has operators."""
    train(tiny(digits, tmp_path / "run", 4, performance__profile="1:3"), launch(1), world)
    trace = read(trace_path(tmp_path / "run" / "profile", 0, 2))
    found = break_down(trace)
    begin, end = trace.steps[0].begin, trace.steps[-1].end
    assert (found.steps, found.on_device) == (2, False)
    assert found.wall == pytest.approx(0.5e-6 * (end - begin))
    assert sum(found.seconds.values()) == pytest.approx(found.wall)
    assert min(found.seconds.values()) >= 0
    own = {"matrix products", "attention", "norms", "activations", "elementwise", "copies", "optimizer", IDLE}
    assert all(found.seconds[kind] > 0 for kind in own)
    assert sum(found.operations.values()) == pytest.approx(sum(found.launches.values()))
    assert all(found.launches[phase] > 0 for phase in ("forward", "backward", "step", "averages"))


def test_operators_on_a_cpu_have_the_time_of_the_innermost(tmp_path: Path) -> None:
    """A copy inside of a product is a copy, a view is part of it, and the optimizer owns all that it runs."""
    events = [
        ("step 1", 0, 100), ("forward", 0, 40), ("aten::linear", 10, 20), ("aten::t", 11, 1), ("aten::copy_", 15, 5),
        ("aten::view", 32, 2), ("optimizer", 50, 30), ("aten::mul_", 55, 10), ("aten::add", 90, 5),
    ]  # fmt: skip
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": [host(*event) for event in events]}, file)
    found = break_down(read(path))
    expected = {"matrix products": 15, "copies": 5, "optimizer": 30, "elementwise": 5, IDLE: 45}
    assert microseconds(found.seconds) == expected
    assert found.launches == {"data": 0, "forward": 1, "backward": 0, "step": 1, "averages": 0, "other": 1}


def host(name: str, begin: float, duration: float, thread: int = 1) -> dict[str, Any]:
    kind = "cpu_op" if "::" in name else "user_annotation"
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": duration, "tid": thread}


def kernel(name: str, begin: float, duration: float, launched: float, thread: int = 1) -> list[dict[str, Any]]:
    """A kernel, and the call that launched it."""
    number = {"correlation": int(launched) + 1}
    call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launched, "dur": 1, "tid": thread}
    there = {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": duration, "tid": 7}
    return [{**call, "args": number}, {**there, "args": number}]


def test_kernels_of_a_gpu_have_its_time() -> None:
    """Computation hides communication and copies beside it; the tail after the host's last step counts.

    What was launched before the first step does not, even if it ends in it.
    """
    vectorized = "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor>"
    events = [
        *kernel(vectorized, -20, 5, launched=-30), *kernel(vectorized, -2, 7, launched=-28),
        host("step 1", 0, 100), host("forward", 0, 40), host("backward", 40, 30), host("optimizer", 70, 20),
        host("aten::mm", 5, 3),
        *kernel("nvjet_hsh_128x256_64x4_2x1", 10, 20, launched=6),
        *kernel("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", 30, 10, launched=41, thread=2),
        *kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 35, 25, launched=45, thread=2),
        *kernel("triton_poi_fused_add_gelu_0", 50, 5, launched=50, thread=2),
        *kernel("void at::native::vectorized_elementwise_kernel<4, at::native::direct_copy_kernel_cuda>", 58, 4, 55),
        *kernel(vectorized, 90, 20, launched=75),
    ]  # fmt: skip
    found = break_down(parse(events))
    assert found.on_device
    expected = {
        "matrix products": 20, "attention": 10, "communication": 15, "activations": 5, "copies": 2, "optimizer": 20,
        IDLE: 38,
    }  # fmt: skip
    assert microseconds(found.seconds) == expected
    assert found.wall == pytest.approx(110e-6)
    assert found.idle_share == pytest.approx(38 / 110)
    assert found.launches == {"data": 0, "forward": 1, "backward": 4, "step": 1, "averages": 0, "other": 0}
    assert sum(found.operations.values()) == 6


def microseconds(seconds: dict[str, float]) -> dict[str, float]:
    return {kind: round(1e6 * value, 6) for kind, value in seconds.items() if round(1e6 * value, 6)}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "convolutions"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>", "matrix products"),
        ("void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits>", "attention"),
        ("_adaln_fwd_kernel", "norms"),
        ("group_norm_bwd_apply_kernel", "group norms"),
        ("geglu_backward_kernel", "activations"),
        ("swiglu_backward_kernel", "activations"),
        ("rotary_bwd_kernel", "norms"),
        ("triton_poi_fused__to_copy_add_mul_sigmoid_view_3", "activations"),
        ("triton_poi_fused_gelu_mul_split_2", "activations"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("Memset (Device)", "elementwise"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("triton_red_fused_native_layer_norm_1", "norms"),
        ("triton_poi_fused__to_copy_add_mul_silu_3", "elementwise"),
        ("triton_poi_fused_convolution_5", "elementwise"),
        ("triton_per_fused__to_copy_convolution_native_group_norm_2", "group norms"),
    ],
)
def test_kernels_by_name(name: str, kind: str) -> None:
    assert of_kernel(name, None) == kind
    assert of_kernel(name, "optimizer") == "optimizer"


def test_every_operator_of_torch_that_a_step_meets_has_a_class_or_no_work() -> None:
    assert of_operator("aten::_scaled_dot_product_flash_attention_for_cpu_backward", None) == "attention"
    assert of_operator("aten::convolution_backward", None) == "convolutions"
    assert of_operator("aten::native_group_norm", None) == "group norms"
    assert of_operator("aten::_to_copy", "attention") == "copies"
    assert of_operator("aten::as_strided", None) is None
    assert of_operator("aten::gelu", None) == "activations"
    assert of_operator("backward", None) is None


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_text("{}")
    with pytest.raises(BenchError, match="expected a gzipped trace"):
        read(path)
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": []}, file)
    with pytest.raises(BenchError, match="no range named step N"):
        read(path)
