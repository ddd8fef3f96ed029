"""The compiled 8-bit AdamW of a CPU: the reference to the bit, one graph for all steps and sizes, and no compiler."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from fastdiff.parallel.fragments import Fragment
from fastdiff_kernels.adamw8bit import BLOCK, compiled
from fastdiff_kernels.adamw8bit.blocks import Key, build_blocks
from fastdiff_kernels.adamw8bit.kernels import adamw8bit, largest
from fastdiff_kernels.adamw8bit.reference import DeviceStep, Extras, Moments, Step
from fastdiff_kernels.names import Backend

CPU = torch.device("cpu")
SLICES = [
    ("whole", 0, 40 * BLOCK),
    ("begins in a block", 100, 20 * BLOCK),
    ("ends in a block", 2 * BLOCK, 9 * BLOCK + 31),
    ("within a block", 30, 7),
    ("few blocks", 0, 3 * BLOCK + 1),
    ("two heads", 255, 8 * BLOCK + 2),
    ("at an odd place", 0, 1000 * BLOCK),
    ("empty", 5, 0),
]
"""Name, first element and number of elements of the slices of a flat tensor, with 5 elements of padding behind each."""
LAYOUT = [
    Fragment(name, start, numel, end - numel - 5)
    for (name, start, numel), end in zip(SLICES, accumulate(numel + 5 for *_, numel in SLICES), strict=True)
]
NUMEL = sum(numel + 5 for *_, numel in SLICES)
STRADDLING = [("begins in a block", 0), ("two heads", 0)]


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    yield
    if compiled.unavailable.cache_info().currsize and compiled.unavailable():
        compiled.unavailable.cache_clear()


def values(seed: int, numel: int = NUMEL) -> Tensor:
    """Numbers of very different sizes in one block."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * 10 ** (-4 * torch.rand(numel, generator=generator))


def numbers(number: int) -> Step:
    return Step(
        number=number, beta1=0.9, beta2=0.999, shrink=1 - 1e-3, rate=1e-2 / (1 - 0.9**number),
        correction=(1 - 0.999**number) ** -0.5, eps=1e-8,
    )  # fmt: skip


def trajectory(
    backend: Backend,
    layout: Sequence[Fragment] = LAYOUT,
    *,
    dtype: torch.dtype = torch.float32,
    extras: bool = False,
    straddling: Sequence[Key] = (),
    spoil: Callable[[Tensor], object] = lambda grad: None,
    steps: int = 4,
) -> dict[str, Tensor]:
    """Parameters, moments, copy and average after a few steps."""
    blocks = build_blocks(layout, CPU, straddling)
    codes = torch.zeros(NUMEL, dtype=torch.int8), torch.zeros(NUMEL, dtype=torch.uint8)
    moments = Moments(*codes, torch.zeros(blocks.pieces), torch.zeros(blocks.pieces))
    param, copy = values(99), torch.full((NUMEL,), 7.0, dtype=torch.bfloat16)
    averages = [torch.full((NUMEL,), 7.0) for _ in range(2)]
    scale = torch.tensor(0.7) if extras else None
    for number in range(1, steps + 1):
        grad = values(number).to(dtype)
        spoil(grad)
        shared = None
        if straddling:  # the other ranks' pieces have twice the moments
            shared = 2 * largest(grad, moments, blocks, numbers(number), scale, backend)
        more = Extras(
            grad_scale=scale, shared=shared, copy=copy if extras else None, averages=averages if extras else (),
            shares=torch.tensor([0.1, 0.9]) if extras else None,
        )  # fmt: skip
        step = numbers(number)
        if extras:
            step = DeviceStep(number=torch.tensor(number), numbers=torch.tensor(step.numbers))
        adamw8bit(param, grad, moments, blocks, step, more, backend)
    names = ("m_codes", "v_codes", "m_scales", "v_scales")
    return {
        "param": param,
        "copy": copy,
        "slow": averages[0],
        "fast": averages[1],
        **{name: getattr(moments, name) for name in names},
    }


def assert_equal_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for name in a:
        differ = (a[name].view(torch.uint8) != b[name].view(torch.uint8)).sum()
        assert not differ, f"{name}: {differ} bytes of {a[name].nbytes} differ"


@pytest.mark.parametrize(
    ("dtype", "extras", "straddling"),
    [(torch.float32, False, ()), (torch.bfloat16, True, STRADDLING)],
    ids=["plain", "all inputs"],
)
def test_compiled_equals_the_reference_to_the_bit(dtype: torch.dtype, extras: bool, straddling: list[Key]) -> None:
    ours, theirs = (
        trajectory(backend, dtype=dtype, extras=extras, straddling=straddling) for backend in ("compile", "reference")
    )
    assert_equal_bits(ours, theirs)
    assert ours["m_codes"].unique().numel() > 200
    padding = torch.ones(NUMEL, dtype=torch.bool)
    for fragment in LAYOUT:
        fragment.of(padding).fill_(False)
    assert torch.equal(ours["param"][padding], values(99)[padding])


def test_steps_and_numbers_of_blocks_share_a_graph() -> None:
    torch._dynamo.reset()  # as other tests of this process do, after which the first call is marked no more
    compiled._marked.clear()
    trajectory("compile", steps=1)
    before = counters["stats"]["unique_graphs"]
    trajectory("compile", steps=9)
    trajectory("compile", [Fragment("other", 0, 333 * BLOCK, 17), Fragment("one more", 9, 50 * BLOCK, 400 * BLOCK)])
    assert counters["stats"]["unique_graphs"] == before


def test_many_blocks_are_cut_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of one block would have a graph of its own."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(compiled, "_AT_ONCE", 8)
    assert list(compiled._calls(5, 100, 17)) == [(5, 100, 5), (10, 100 + 5 * BLOCK, 6), (16, 100 + 11 * BLOCK, 6)]
    uncut = trajectory("reference")
    assert_equal_bits(trajectory("compile"), uncut)


def test_most_elements_are_updated_by_compiled_code() -> None:
    parts = compiled._parts(build_blocks(LAYOUT, CPU))
    # 20 blocks from element 100 on contain 19 whole ones; from element 255 on, 8 of the 8 blocks and 2 elements.
    assert [count for _, _, count in parts.whole] == [40, 19, 9, 8, 1000]
    assert sum(numel for *_, numel in SLICES) == BLOCK * sum(c for _, _, c in parts.whole) + sum(
        piece.numel for piece in parts.rest.slices
    )
    assert parts.rest.pieces == len(parts.index) == len(set(parts.index.tolist()))


@pytest.mark.parametrize("value", [torch.nan, 1e30])
def test_what_is_not_finite_stays_in_its_block(value: float) -> None:
    """Also a square that is not, of a gradient that is."""

    def spoil(grad: Tensor) -> None:
        grad[BLOCK + 3] = value

    found = trajectory("compile", spoil=spoil, steps=3)
    assert found["param"][BLOCK : 2 * BLOCK].isnan().all()
    assert found["param"][2 * BLOCK :].isfinite().all()
    assert found["v_scales"].isnan().nonzero().flatten().tolist() == [1]
    assert_equal_bits(
        {name: value[2 * BLOCK :] for name, value in found.items() if "scales" not in name},
        {name: value[2 * BLOCK :] for name, value in trajectory("reference", steps=3).items() if "scales" not in name},
    )


def test_parameters_in_bf16_are_left_to_the_reference() -> None:
    blocks = build_blocks([Fragment("p", 0, 20 * BLOCK, 0)], CPU)
    found = []
    for backend in ("compile", "reference"):
        param, codes = values(1, 20 * BLOCK).bfloat16(), torch.zeros(20 * BLOCK, dtype=torch.int8)
        moments = Moments(codes, codes.to(torch.uint8), torch.zeros(20), torch.zeros(20))
        adamw8bit(param, values(2, 20 * BLOCK), moments, blocks, numbers(1), None, backend)  # type: ignore[arg-type]
        found.append(param)
    assert torch.equal(*found)


# --- where it cannot be compiled ---


def test_without_a_compiler_it_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled.unavailable.cache_clear()
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    message = r"adamw8bit, backend 'compile': there is no C\+\+ compiler \(g\+\+\); install g\+\+, .*'reference'"
    with pytest.raises(RuntimeError, match=message):
        trajectory("compile")


def test_a_compiler_that_fails_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("fatal error: Python.h: No such file or directory\n#include <Python.h>")

    compiled.unavailable.cache_clear()
    monkeypatch.setattr(compiled, "_compiled", lambda: fails)
    assert compiled.unavailable() == (
        "it does not compile here (RuntimeError: fatal error: Python.h: No such file or directory)"
    )


def test_code_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def contracted(w: Tensor, *others: object) -> None:
        compiled._update(w, *others)  # type: ignore[arg-type]
        w[5, 7] = torch.nextafter(w[5, 7], torch.tensor(9.0))

    compiled.unavailable.cache_clear()
    monkeypatch.setattr(compiled, "_compiled", lambda: contracted)
    assert compiled.unavailable() == "the compiled code differs from the reference"
