"""What fp32 promises of a sum in any order."""

import torch
from torch import Tensor


def assert_summed(found: Tensor, exact: Tensor, absolute: Tensor, terms: int) -> None:
    """Require sums in fp32, rounded to the dtype of ``found``.

    Args:
        found: the sums.
        exact: in fp64.
        absolute: the same of the absolute values of the terms.
        terms: of a sum.
    """
    of_sum = terms * 2.0**-24 * absolute.double()
    allowed = of_sum + torch.finfo(found.dtype).eps / 2 * (exact.abs() + of_sum)
    worst = ((found.double() - exact).abs() / allowed).max().item()
    assert worst <= 1, f"{worst:.3g} times the error that is allowed"
