"""Least operations and bytes of the cases, compared with those of eager PyTorch."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fastdiff_bench.cases import OPS, cases
from fastdiff_bench.cases.case import Case, as_sequence
from fastdiff_bench.commands import op
from tests.support.benches.bench_kernels import squaring

_ONE = {
    "add", "sub", "rsub", "mul", "div", "exp", "log", "sqrt", "rsqrt", "reciprocal", "pow", "clamp", "sum", "mean",
    "amax", "bitwise_and", "bitwise_or", "bitwise_xor", "__rshift", "__lshift",
}  # fmt: skip
_SEVERAL = {"sigmoid": 3, "var_mean": 4}
_COMPOSED = ("native_group_norm", "native_layer_norm", "silu")


class Arithmetic(TorchDispatchMode):
    """Counts the operations on numbers by the rule of ``Case.forward_operations``."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        if name.startswith(_COMPOSED):
            with self:
                return decomposition_table[func](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
        self.count += (1 if name in _ONE else _SEVERAL.get(name, 0)) * max(sizes, default=0)
        return result


def counted(case: Case) -> tuple[int, int]:
    """Operations of eager PyTorch, forward and backward."""
    inputs = case.build("cpu")
    with Arithmetic() as forward:
        outputs = as_sequence(case.call(inputs, "reference"))
    with Arithmetic() as backward:
        case.gradients(inputs, outputs, [torch.ones_like(output) for output in outputs])
    return forward.count, backward.count


def least(case: Case) -> tuple[int, int]:
    inputs = case.build("cpu")
    assert case.forward_operations is not None
    return case.forward_operations(inputs), case.backward_operations(inputs) if case.backward_operations else 0


def forms(op: str) -> list[Case]:
    """One case of each form of an op: those that differ by size alone are left out."""
    found = {}
    for case in cases((op,)):
        found.setdefault((case.shape.strip("0123456789x-").lstrip("SBLX"), case.dtype), case)
    return list(found.values())


@pytest.mark.parametrize("case", cases(("attention",)), ids=str)
def test_attention_counts_the_products_that_torch_counts(case: Case) -> None:
    """Those of the valid keys: torch multiplies with the masked ones, too."""
    masked = "masked" in case.shape
    inputs = case.build("cpu" if masked else "meta")
    valid = float(inputs["mask"].double().mean()) if masked else 1.0
    with FlopCounterMode(display=False) as forward:
        outputs = as_sequence(case.call(inputs, "reference"))
    with FlopCounterMode(display=False) as backward:
        case.gradients(inputs, outputs, [torch.ones_like(output) for output in outputs])
    assert case.forward_operations is not None
    assert case.backward_operations is not None
    assert case.forward_operations(inputs) == pytest.approx(valid * forward.get_total_flops(), rel=1e-12)
    assert case.backward_operations(inputs) == pytest.approx(valid * backward.get_total_flops(), rel=1e-12)


@pytest.mark.parametrize("case", [*forms("group_norm"), *forms("adaln"), *forms("adamw8bit")], ids=str)
def test_least_operations_are_near_those_of_eager(case: Case) -> None:
    for fewest, taken in zip(least(case), counted(case), strict=True):
        assert 0.8 * fewest <= taken <= 1.6 * fewest


@pytest.mark.parametrize("case", [*forms("philox"), *forms("noising"), *forms("loss"), *forms("dropout")], ids=str)
def test_eager_takes_up_to_four_times_the_least_operations_for_random_numbers(case: Case) -> None:
    """It has no product of 32-bit words, and writes out logarithm, sine and cosine."""
    fewest, taken = least(case)[0], counted(case)[0]
    assert fewest <= taken <= 4 * fewest


@pytest.mark.parametrize("case", cases(("loss",)), ids=str)
def test_the_loss_takes_one_operation_less_to_differentiate(case: Case) -> None:
    latents = case.build("meta")["latents"]
    elements = latents.numel() // (2 if "posterior" in case.shape else 1)
    forward, backward = least(case)
    assert forward - backward == elements


def test_every_case_counts_operations_in_each_direction_that_it_has() -> None:
    without_backward = {"philox", "noising", "adamw", "adamw8bit", "weight_gradient", "fp8"}
    for case in cases():
        assert case.forward_operations is not None
        assert (case.backward_operations is None) == (case.op in without_backward), str(case)


def test_bytes_of_an_op_are_what_enters_and_leaves_unless_the_case_knows_better() -> None:
    x, out, gradient = torch.empty(10), torch.empty(20), torch.empty(10)
    case = squaring()
    assert op._least_bytes(case, {"x": x, "groups": 4}, [out], [gradient]) == {"forward": 120, "backward": 160}


def test_every_case_has_inputs_and_a_name_of_its_own() -> None:
    every = cases()
    assert len({str(case) for case in every}) == len(every)
    assert {case.op for case in every} == set(OPS)
