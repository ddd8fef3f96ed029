"""Registry of the optimizers. This module imports no torch.

The optimizers of this package are listed in ``_BUILT_IN``. One of another package is found by its entry point, so that
every command knows it:

    [project.entry-points."fastdiff.optimizers"]
    lion = "my_package.family:LION"

The entry point names an ``OptimizerFamily``. Within one process ``register(LION)`` is enough.
"""

from dataclasses import MISSING, fields
from functools import cache, reduce
from inspect import signature
from operator import or_
from pkgutil import resolve_name
from typing import Annotated, Any, get_args, get_type_hints

from fastdiff.config.optimizers.adamw import ADAMW, ADAMW8BIT, ADAMW8BIT_BNB
from fastdiff.config.optimizers.family import BYTES, OptimizerFamily, Unit
from fastdiff.config.optimizers.muon import MUON, MUON8BIT, MUON_BF16
from fastdiff.config.sections.optim import OptimConfig
from fastdiff.errors import ConfigError, require
from fastdiff.plugins.user_code import Group, Installed, load_installed

ENTRY_POINTS: Group = "fastdiff.optimizers"
"""Group of the entry points (``module:FAMILY``) by which other packages register optimizers."""
_BUILT_IN = (ADAMW, ADAMW8BIT, ADAMW8BIT_BNB, MUON, MUON_BF16, MUON8BIT)
_registered: dict[str, OptimizerFamily] = {family.name: family for family in _BUILT_IN}


def register(family: OptimizerFamily) -> OptimizerFamily:
    """Register an optimizer and return its family.

    Raises:
        ConfigError: another optimizer has this name, or its parts contradict each other.
    """
    _require_consistent(family)
    known = _registered.setdefault(family.name, family)
    require(known is family, f"two optimizers have the name {family.name}; rename one")
    return family


def _require_consistent(family: OptimizerFamily) -> None:
    derived = isinstance(family.config, type) and issubclass(family.config, OptimConfig)
    require(derived, f"the optimizer {family.name} cannot be registered: its config does not derive from OptimConfig")
    named = get_args(get_type_hints(family.config)["name"])
    wrong = next(filter(None, (
        f"{family.config.__name__}.name is not Literal[{family.name!r}]" if family.name not in named else "",
        *(f"{family.config.__name__}.{one.name} has no default" for one in fields(family.config)
          if one.name != "name" and one.default is MISSING and one.default_factory is MISSING),
        *(f"{one.name} has the unit {one.unit}, expected {', '.join(get_args(Unit))}" for one in family.state
          if one.unit not in get_args(Unit)),
        *(f"{one.name} has the dtype {one.dtype}, expected {', '.join(BYTES)}" for one in family.state
          if one.dtype not in BYTES),
        *(f"{one.name} has an entry per {one.unit}, which needs whole_matrices=True" for one in family.state
          if one.unit in ("matrix", "parameter") and not family.whole_matrices),
        *(f"{one.name} is of {one.of}, which needs whole_matrices=True and a matrix_step" for one in family.state
          if one.of != "all" and not (family.whole_matrices and family.matrix_step)),
        *(f"{one.name} is {one.dtype} per {one.unit}, expected float32 per element, matrix or parameter with "
          "whole_matrices=True" for one in family.state
          if family.whole_matrices and one.of == "all" and (one.unit == "block" or one.dtype != "float32")),
    )), None)  # fmt: skip
    require(wrong is None, f"the optimizer {family.name} cannot be registered: {wrong}")


class AnyOptimizer:
    """Annotation by which pydantic accepts the configuration of every known optimizer, discriminated by ``name``."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Return the schema of all types."""
        from pydantic import Field

        types = list(dict.fromkeys(family.config for family in optimizers().values()))
        if len(types) == 1:
            return handler.generate_schema(types[0])
        return handler.generate_schema(Annotated[reduce(or_, types), Field(discriminator="name")])


def optimizers() -> dict[str, OptimizerFamily]:
    """Return the family of every optimizer by name: built in, installed, or registered by this process."""
    found = {name: family for name, (_, family) in _installed().found.items()}
    return _registered | found | _registered  # those of this process come first, and have precedence


def optimizer_family(name: str, source: str = "--optim.name") -> OptimizerFamily:
    """Return the family of the optimizer of this name.

    Raises:
        ConfigError: unknown name, or that of a broken package; ``source`` names its origin.
    """
    known = optimizers()
    if name not in known:
        unknown = (
            f"{source}: not a known optimizer, given {name!r}; expected {', '.join(known)}, or install the package "
            f"that registers it under the entry points {ENTRY_POINTS}"
        )
        raise ConfigError("; ".join([unknown, *_installed().wrong]))
    return known[name]


def family_of(config: OptimConfig) -> OptimizerFamily:
    """Return the family of a configured optimizer."""
    return optimizer_family(config.name)


def package_of(name: str) -> str | None:
    """Return the entry point and the package with its version of an installed optimizer; None: it is of no package."""
    return _installed().identity_of(name, optimizers()[name])


def is_built_in(family: OptimizerFamily) -> bool:
    """Return whether a family is of this package, so that an exception of its code is a bug of fastdiff."""
    return family in _BUILT_IN


def optimizer_class(config: OptimConfig) -> type[Any]:
    """Import the class of a configured optimizer.

    Raises:
        ConfigError: it cannot be imported, or does not take the hyper-parameters.
    """
    family = family_of(config)
    try:
        found: type[Any] = resolve_name(family.optimizer)
    except Exception as error:  # also of the code of its module
        raise ConfigError(
            f"--optim.name {family.name} needs {family.optimizer} of {family.library}, which cannot be imported "
            f"({error}); {family.remedy}"
        ) from None
    given = {**config.hyper_parameters(), **family.arguments}
    try:
        signature(found).bind([], **given)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"--optim.name {family.name}: {family.optimizer} is called with the parameters and {', '.join(given)}, but "
            f"{error}; let its __init__ take every hyper-parameter of {family.config.__name__}, weight_decay too"
        ) from None
    return found


@cache
def _installed() -> Installed[str, OptimizerFamily]:
    return load_installed(ENTRY_POINTS, "optimizer", _checked, [family.name for family in _BUILT_IN])


def _checked(family: Any, title: str) -> tuple[str, OptimizerFamily]:
    if not isinstance(family, OptimizerFamily):
        raise ConfigError(f"{title} is a {type(family).__name__}, expected an OptimizerFamily")
    _require_consistent(family)
    return family.name, family
