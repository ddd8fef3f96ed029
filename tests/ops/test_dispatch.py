"""The implementation of an op: by argument, then by the forced choice, then by default."""

from contextlib import suppress
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from torch import nn

from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff_kernels import attention, dispatch, launch
from fastdiff_kernels.dispatch import Choice
from fastdiff_kernels.names import BACKENDS, OPS, AttentionBackend

CPU = torch.empty(0)


class OnCuda:
    """As much of a CUDA tensor as the decision looks at."""

    is_cuda = True
    device = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def nothing_forced():
    dispatch.force({})
    yield
    dispatch.force({})


def test_the_configuration_takes_every_name_and_no_other():
    assert get_type_hints(PerformanceConfig)["attention"] == AttentionBackend
    assert PerformanceConfig(kernels="compile").kernel_backends() == dict.fromkeys(OPS, "compile")
    for backend in BACKENDS:
        for op in OPS:
            assert PerformanceConfig(kernels=f"{op}={backend}").kernel_backends() == {op: backend}


def test_the_default_is_triton_on_cuda_and_the_reference_elsewhere():
    assert dispatch.explained("adaln", OnCuda()) == ("triton", "on CUDA")
    assert dispatch.explained("adaln", CPU) == ("reference", "the tensor is on cpu")


def test_a_trivial_kernel_is_launched_or_its_error_told(monkeypatch):
    """In the interpreter without a GPU."""
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert launch.trial(here) is None
    with monkeypatch.context() as patch:
        patch.setattr(launch, "run", lambda *_: None)
        assert launch.trial(here) == f"1 + 1 is 1 on {here}"

        def broken(*_):
            raise RuntimeError("Failed to find C compiler.\nPlease specify")

        patch.setattr(launch, "run", broken)
        assert launch.trial(here) == "RuntimeError: Failed to find C compiler. Please specify"
        patch.setattr(launch, "triton", None)
        assert launch.trial(here) == "Triton is not installed; pip install triton"


def test_without_triton_the_reference_runs_and_says_so(monkeypatch):
    monkeypatch.setattr(launch, "triton", None)
    assert dispatch.explained("adaln", OnCuda()) == ("reference", "Triton is not installed")
    with pytest.raises(RuntimeError, match="Triton is not installed; install it or use backend 'reference'"):
        dispatch.choose("adaln", OnCuda(), "triton")


def test_a_forced_backend_beats_the_default_and_an_argument_beats_both():
    dispatch.force({"adaln": "compile"})
    assert dispatch.explained("adaln", OnCuda()) == ("compile", "forced")
    assert dispatch.explained("adaln", OnCuda(), "reference") == ("reference", "asked for")
    assert dispatch.choose("loss", OnCuda()) == "triton"
    dispatch.force({"loss": "reference"})
    assert dispatch.choose("adaln", OnCuda()) == "triton"
    assert dispatch.choose("loss", OnCuda()) == "reference"


def test_forced_ends_with_its_block_also_after_an_error():
    dispatch.force({"loss": "compile"})
    with dispatch.forced(adaln="reference"):
        assert dispatch.choose("adaln", OnCuda()) == "reference"
        assert dispatch.choose("loss", OnCuda()) == "compile"
    with suppress(ZeroDivisionError), dispatch.forced(adaln="reference"):
        raise ZeroDivisionError
    assert dispatch.choose("adaln", OnCuda()) == "triton"
    assert dispatch.choose("loss", OnCuda()) == "compile"


def test_unknown_names_are_refused_and_change_nothing():
    dispatch.force({"loss": "compile"})
    with pytest.raises(ValueError, match="op 'adalm': expected one of philox, noising, loss"):
        dispatch.force({"loss": "reference", "adalm": "triton"})
    with pytest.raises(ValueError, match="backend 'cuda': expected 'triton'"):
        dispatch.force({"loss": "cuda"})
    assert dispatch.choose("loss", CPU) == "compile"
    for call in (dispatch.choose, dispatch.choice):
        with pytest.raises(ValueError, match="op 'adalm'"):
            call("adalm", CPU)


def test_triton_is_refused_where_it_cannot_run(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    dispatch.force({"adaln": "triton"})
    with pytest.raises(RuntimeError, match=r"tensor is on cpu, expected CUDA.*TRITON_INTERPRET=1"):
        dispatch.choose("adaln", CPU)
    monkeypatch.setattr(launch, "INTERPRETED", launch.triton is not None)
    assert dispatch.choose("adaln", CPU) == "triton"


def test_a_reference_is_compiled_once_and_not_inside_a_compiled_function(monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: calls.append(options) or (lambda x: -x))
    dispatch._compiled.cache_clear()
    for _ in range(2):
        assert dispatch.plain(abs, "compile")(3) == -3
    assert calls == [{"fullgraph": True}]
    assert dispatch.plain(abs, "reference") is abs
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert dispatch.plain(abs, "compile") is abs
    dispatch._compiled.cache_clear()


@pytest.mark.nightly
def test_a_compiled_reference_takes_as_many_forms_as_a_unet_has():
    def reference(x, form):
        return x if form.startswith("form") else -x

    x = torch.zeros(2)
    for number in range(10):  # torch gives up after 8
        assert dispatch.plain(reference, "compile")(x, f"form {number}") is x


def test_no_kernel_adds_in_the_order_of_arrival():
    for path in Path(dispatch.__file__).parent.rglob("*.py"):
        assert "atomic" not in path.read_text(), path


class Layer(nn.Module):
    def choices(self, example):
        yield dispatch.choice("adaln", example)
        yield attention.choice(8, 4, 4, example, "reference")


def test_explain_goes_through_the_modules_in_order():
    model = nn.Sequential(nn.Linear(2, 2), Layer(), nn.Sequential(Layer()))
    adaln = Choice("adaln", "reference", "reference", "the tensor is on cpu")
    assert [(name, choice.op) for name, choice in dispatch.explain(model, CPU)] == [
        ("1", "adaln"), ("1", "attention"), ("2.0", "adaln"), ("2.0", "attention"),
    ]  # fmt: skip
    assert dispatch.explain(model, CPU)[2] == ("2.0", adaln)
    dispatch.force({"adaln": "compile"})
    assert dispatch.explain(Layer(), CPU)[0] == ("", Choice("adaln", "compile", "compile", "forced"))
    assert dispatch.explain(nn.Linear(2, 2), CPU) == []


def test_an_op_without_a_gradient_has_no_backward():
    assert dispatch.choice("noising", CPU, differentiated=False).backward == "-"
