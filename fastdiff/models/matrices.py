"""Matrices of the network of a run, for an optimizer that treats a matrix as a whole."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import prod

from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.optimizers.registry import family_of as optimizer_of
from fastdiff.config.run import RunConfig
from fastdiff.errors import require
from fastdiff.models.family import family_of
from fastdiff.models.fused import Matrices, Matrix

Shapes = Mapping[str, tuple[int, ...]]


def matrices_of(config: RunConfig, shapes: Shapes) -> Matrices:
    """Return the matrices of the trained parameters of a run; none, if its optimizer does not ask for them.

    Args:
        config: the run.
        shapes: of the trained parameters.

    Raises:
        ConfigError: its network does not declare a parameter of two or more dimensions.
    """
    if optimizer_of(config.optim).matrix_step is None:
        return {}
    return declared_matrices(config.model, shapes, f"--optim.name {config.optim.name}")


def elements_in(matrices: Matrices, shapes: Shapes) -> int:
    """Return the elements of the trained parameters in which there are matrices."""
    return sum(prod(shapes[name]) for name in matrices)


def declared_matrices(model: ModelConfig, shapes: Shapes, flag: str) -> Matrices:
    """Return the matrices that a network declares; see ``matrices_of``, and ``flag``: what asks for them."""
    declared = family_of(model).matrices(model)
    found: dict[str, Matrix] = {}
    for name, shape in shapes.items():
        if len(shape) < 2:
            continue
        fits = [fused for pattern, fused in declared.items() if fnmatchcase(name, pattern)]
        require(
            len(fits) > 0,
            f"{flag}: the network {model.kind} does not declare whether {name}, {list(shape)}, is a matrix; name it in "
            "its ModelFamily.matrices (of a torch.nn.Module: its class attribute matrices), or use --optim.name adamw",
        )
        if (fused := fits[0]) is not None:
            found[name] = fused.cut(shape)
    return found
