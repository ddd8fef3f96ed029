"""Scales of FP8 operands from the maxima of earlier steps (delayed scaling).

Each operand of a product has one scale, ``unit``: the power of two from which the largest e4m3 number is at least
``MARGIN`` times the largest value of the last ``WINDOW`` steps. The maximum is taken over all micro-batches and ranks,
and gradients count as those of the mean over the global batch: so scales depend neither on the number of ranks nor on
the micro-batch, and as powers of two not on the last bits of a maximum either. With a margin, because values that are
clipped cost far more than those that lose a bit: on trained weights all gradients of a DiT differ from fp32 by 0.035 to
0.082 if scales clip nothing, by 0.7 to 3.8 if they clip the largest values by up to a half (``fastdiff bench fp8``).

The first ``WINDOW`` steps multiply in 16 bits and only record. At the start a gate of zeros makes gradients of zero,
which then grow by a multiple per step: no scale of earlier steps would fit, and one of the micro-batch itself would
depend on its size.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fastdiff.console import log
from fastdiff_kernels.fp8.values import LARGEST, Form

WINDOW = 16
"""Steps whose maxima count."""
MARGIN = 2.0
"""Factor by which a value may exceed the largest of the window."""
INPUT, WEIGHT, GRADIENT = range(3)
"""Operands of a layer; the last is the gradient of its output."""
_LEAST, _MOST = -100, 100
"""Limits of the exponents of scales, so that inverses and products of two are finite."""


class Forms(NamedTuple):
    """What a block writes of its operands."""

    operand: Form
    """Of inputs and gradients."""
    weight: Form
    """In the forward pass."""
    turned_weight: Form
    """In the backward pass."""


PLAIN = Forms(Form(plain=True), Form(plain=True), Form(plain=True))
"""Products in 16 bits."""


def forms(*, weight_gradients: bool) -> Forms:
    """Return the forms of FP8 products; ``weight_gradients``: those of the weights, too."""
    operand = Form(rows=True, columns=weight_gradients, plain=not weight_gradients)
    return Forms(operand, Form(rows=True), Form(columns=True))


class Scales:
    """The scales of a network that multiplies in no FP8: none."""

    forms = PLAIN
    """Those of the next micro-batch: an attribute, because compiled code and graphs depend on it."""

    def attach(self, factor: int) -> None:
        """Say by what the gradients of this rank exceed those of the mean over the global batch: ranks to average."""

    def end_step(self, largest_of_all: Callable[[Tensor], object], *, applied: bool) -> None:
        """Take the maxima of a step; called by all ranks.

        Args:
            largest_of_all: replaces a tensor by its maximum over all ranks.
            applied: whether the step changed the weights; otherwise its maxima are dropped. So is a maximum that is not
                finite: the history of its operand stays as it was.
        """

    def end_warm_up(self) -> None:
        """Multiply in FP8 from the next micro-batch on, whatever the history: for measurements."""

    def each_form(self) -> Iterator[None]:
        """Take each of the forms that a run goes through in turn, to rehearse it."""
        yield

    def forget(self) -> None:
        """Drop the maxima of the step so far."""

    def state(self) -> dict[str, Tensor]:
        """Return the history for a checkpoint, equal on every rank: ``maxima`` and the number of ``steps``."""
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore the history of a checkpoint; an empty one resets."""


class DelayedScales(Scales):
    """The scales of all layers of a network, and the maxima that they come from.

    Args:
        blocks: of the network.
        layers: of a block.
        device: of the network.
        forms: of operands once there are scales.
    """

    def __init__(self, blocks: int, layers: int, device: torch.device, forms: Forms) -> None:
        shape = (blocks, layers, GRADIENT + 1)
        self.units = torch.ones(shape, device=device)
        self.maxima = torch.zeros(shape, device=device)
        """Of the step so far, on this rank."""
        self._history = torch.zeros(WINDOW, *shape, device=device)
        """Of the last steps, over all ranks; those of a step are at its number modulo ``WINDOW``."""
        self._steps, self._factor, self._warm_up = 0, 1, WINDOW
        self._forms = forms
        self.forms = PLAIN

    def part(self, block: int, first: int, end: int) -> "LayerScales":
        """Return the scales of the layers ``first`` to ``end`` of a block."""
        return LayerScales(self, self.units[block, first:end], self.maxima[block, first:end])

    def attach(self, factor: int) -> None:
        """See ``Scales``."""
        self._factor = factor
        self._set_units()

    def end_warm_up(self) -> None:
        """See ``Scales``."""
        self._warm_up = 0
        self._set_units()

    def each_form(self) -> Iterator[None]:
        """See ``Scales``."""
        before = self.forms
        try:
            for found in dict.fromkeys((before, self._forms)):
                self.forms = found
                yield
        finally:
            self.forms = before

    @torch.no_grad()
    def end_step(self, largest_of_all: Callable[[Tensor], object], *, applied: bool) -> None:
        """See ``Scales``."""
        if applied:
            # As infinity, since a maximum of several ranks may drop NaN.
            largest_of_all(self.maxima.nan_to_num_(nan=torch.inf, posinf=torch.inf))
            self.maxima[..., GRADIENT] /= self._factor
            latest = self._history[self._steps % WINDOW]
            latest.copy_(torch.where(self.maxima.isfinite(), self.maxima, latest))
            self._steps += 1
            self._set_units()
        self.forget()

    def forget(self) -> None:
        """See ``Scales``."""
        self.maxima.zero_()

    def _set_units(self) -> None:
        needed = self._history.amax(0) * (MARGIN / LARGEST)
        mantissa, exponent = torch.frexp(needed)  # needed = mantissa * 2^exponent, mantissa in [0.5, 1)
        exponent = torch.where(mantissa > 0.5, exponent, exponent - 1)
        exponent = torch.where(needed > 0, exponent, 0)
        exponent[..., GRADIENT] += (self._factor - 1).bit_length()  # the power of two from the factor up
        bits = (exponent.clamp(_LEAST, _MOST) + 127) << 23
        self.units.copy_(bits.to(torch.int32).view(torch.float32))
        self.forms = self._forms if self._steps >= self._warm_up else PLAIN

    def state(self) -> dict[str, Tensor]:
        """See ``Scales``."""
        return {"maxima": self._history, "steps": torch.tensor(self._steps)}

    def restore(self, state: dict[str, Tensor]) -> None:
        """See ``Scales``."""
        fits = bool(state) and state["maxima"].shape == self._history.shape
        if state and not fits:
            log.warning(
                f"the checkpoint has scales of {len(state['maxima'][0])} blocks in FP8, and this run has "
                f"{len(self.units)}: the next {WINDOW} steps multiply in 16 bits and record anew"
            )
        self._history.copy_(state["maxima"] if fits else torch.zeros(()))
        self._steps = int(state["steps"]) if fits else 0
        self.forget()
        self._set_units()


class LayerScales:
    """The scales of some layers of a block, and the way of their maxima: they are the gradient of ``probe``.

    So a block needs no side effect, which neither compiled code nor recomputation could have.
    """

    def __init__(self, scales: DelayedScales, units: Tensor, maxima: Tensor) -> None:
        self._scales = scales
        self.units = units
        """fp32 ``[layers, 3]``, a view: of each layer's input, weight and gradient."""
        self.probe = torch.zeros_like(units, requires_grad=True)
        """``[layers, 3]``; a backward pass gives it the maxima of its micro-batch as a gradient."""

        def observe(probe: Tensor) -> None:
            assert probe.grad is not None
            torch.maximum(maxima, probe.grad, out=maxima)
            probe.grad = None

        self.probe.register_post_accumulate_grad_hook(observe)  # type: ignore[no-untyped-call]

    @property
    def forms(self) -> Forms:
        """Those of the next micro-batch."""
        return self._scales.forms
