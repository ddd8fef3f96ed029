"""What leaves tokens out of the middle blocks of a network in a training step (``--model.routing``).

The choice of a sample is a function of the seed and its position, that of a whole step of the seed and its number:
neither knows ranks or micro-batches.
"""

from collections.abc import Iterator

from torch import Tensor

from fastdiff.batch import Condition
from fastdiff.config.networks.routing import PATH, SCORES, Route
from fastdiff.rng import Stream, uniform


class TokenRouting:
    """Draws which tokens are kept, and which steps lose the output of the blocks that keep them.

    Args:
        route: of the network.
        seed: key of every draw.
        batch_samples: samples of an optimizer step.
        dense_from: samples of the run after which no token is left out; beyond its end: none.
    """

    def __init__(self, route: Route, *, seed: int, batch_samples: int, dense_from: int) -> None:
        self._route, self._seed, self._batch_samples, self._dense_from = route, seed, batch_samples, dense_from
        self.is_dense = False
        """Whether no token is left out in the present step."""

    def begin_step(self, samples: int) -> None:
        """Set ``is_dense`` for the step behind this many samples of the run."""
        self.is_dense = samples >= self._dense_from

    def each_kind(self, samples: int) -> Iterator[None]:
        """Take each kind of step in turn that the run has behind this many samples; then the next step's again."""
        kinds = {False: samples < self._dense_from, True: self._route.dense_share > 0}
        for self.is_dense, is_to_come in kinds.items():
            if is_to_come:
                yield
        self.begin_step(samples)

    def drawn(self, position: Tensor) -> Condition:
        """Return scores ``[B, T]`` fp32, unless the step is dense, and whether a sample has its path, ``[B]`` bool."""
        found: Condition = {}
        if not self.is_dense:
            found[SCORES] = uniform(self._seed, Stream.ROUTING, position, self._route.tokens)
        if self._route.path_drop is not None:
            step = position // self._batch_samples
            found[PATH] = uniform(self._seed, Stream.PATH_DROP, step, 1)[:, 0] >= self._route.path_drop
        return found
