"""Accuracy criterion: at most twice the error of eager PyTorch in the same dtype, against fp64; of sums three times."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Op = Callable[..., Tensor | Sequence[Tensor]]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill the memory of ``torch.empty``, so that elements that a kernel does not write are detected.

    Floats are filled with NaN, integers with their largest value.
    """
    settings: Any = torch.utils.deterministic
    before, fill = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = True
    try:
        if not torch.empty(1).isnan().all():
            raise RuntimeError(
                "torch.empty does not fill its memory with NaN, so unwritten elements would not be detected"
            )
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = fill


def evaluate(op: Op, inputs: dict[str, Any], upstream: Sequence[Tensor] | None) -> dict[str, Tensor]:
    """Return the outputs ``out0 ...`` and the gradient ``d<name>`` of each input that requires one.

    Args:
        op: called with ``inputs`` by name.
        inputs: tensors and plain values; tensors keep their strides.
        upstream: gradient of each output, in the order of the outputs; None: no backward pass.
    """
    leaves = {k: _leaf(v) for k, v in inputs.items()}
    outputs = op(**leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    results = {f"out{i}": output.detach() for i, output in enumerate(outputs)}
    wanted = {k: v for k, v in leaves.items() if isinstance(v, Tensor) and v.requires_grad}
    if upstream is not None and wanted:
        seeds = [u.to(o.dtype) for u, o in zip(upstream, outputs, strict=True)]
        gradients = torch.autograd.grad(outputs, list(wanted.values()), seeds)
        results |= {f"d{name}": g for name, g in zip(wanted, gradients, strict=True)}
    return results


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def exact(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return ``inputs`` with every floating tensor in fp64, same values."""
    return {
        k: v.detach().double().requires_grad_(v.requires_grad) if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in inputs.items()
    }


def assert_as_accurate_as_eager(
    op: Op, reference: Op, inputs: dict[str, Any], upstream: Sequence[Tensor] | None = None, *,
    sums: Collection[str] = (),
) -> None:  # fmt: skip
    """Require of ``op`` at most twice the error of ``reference`` in the dtype of ``inputs``, in maximum and RMS.

    The error is measured against ``reference`` in fp64, for every output and every gradient. Rounding the exact result
    to the output's dtype is the least possible error, so it is allowed even where eager is exact. For ``sums`` see
    ``assert_no_worse``.
    """
    oracle = evaluate(reference, exact(inputs), None if upstream is None else [u.double() for u in upstream])
    eager = evaluate(reference, inputs, upstream)
    with poisoned_memory():
        ours = evaluate(op, inputs, upstream)
    assert_no_worse(ours, eager, oracle, sums=sums)


def assert_no_worse(
    ours: dict[str, Tensor], eager: dict[str, Tensor], oracle: dict[str, Tensor], *, sums: Collection[str] = ()
) -> None:
    """Apply the criterion to existing results, by name; ``oracle`` holds the results in fp64.

    Results named in ``sums`` are sums over many rows, compared in RMS alone, up to three times: two orders of addition
    round differently, so that the largest of a few hundred errors exceeds twice that of the other order by chance, and
    the RMS of a few sums does.

    Raises:
        AssertionError: they are less accurate, or of another dtype or shape; also under ``python -O``.
    """
    _hold(ours.keys() == eager.keys(), f"gives {', '.join(ours)}, eager {', '.join(eager)}")
    for name, value in ours.items():
        _hold(value.dtype == eager[name].dtype, f"{name}: {value.dtype}, eager gives {eager[name].dtype}")
        shapes = f"{name}: {tuple(value.shape)}, eager {tuple(oracle[name].shape)}"
        _hold(value.shape == oracle[name].shape, shapes)
        rounded = oracle[name].to(value.dtype)
        factor, measures = (3.0, [_rms]) if name in sums else (2.0, [_maximum, _rms])
        for measure in measures:
            least = measure(rounded, oracle[name])
            allowed = factor * max(measure(eager[name], oracle[name]), least)
            got = measure(value, oracle[name])
            _hold(got <= allowed, f"{name}: {measure.__name__} error {got:.3e}, allowed {allowed:.3e}")


def _maximum(value: Tensor, oracle: Tensor) -> float:
    return _finite(value.double() - oracle).abs().max().item() if value.numel() else 0.0


def _rms(value: Tensor, oracle: Tensor) -> float:
    return _finite(value.double() - oracle).square().mean().sqrt().item() if value.numel() else 0.0


def _finite(error: Tensor) -> Tensor:
    _hold(bool(error.isfinite().all()), "not finite: an element was not written, or overflowed")
    return error


def _hold(right: bool, otherwise: str) -> None:
    if not right:
        raise AssertionError(otherwise)
