"""Configuration of a plain ``torch.nn.Module``, made from the arguments of its constructor; it imports no torch.

The constructor takes keyword arguments of the types int, float, bool and str, each with a default; they become
``--model.ARGUMENT``. ``channels``, ``size`` and ``classes`` describe the data; a constructor that takes none of them
has them nevertheless in its configuration. A class attribute ``kind`` names the network; otherwise it is the name of
the class in lower case.
"""

import inspect
import sys
from dataclasses import field, make_dataclass
from typing import Any, ClassVar, Literal, get_type_hints

from fastdiff.config.networks.registry import ModelConfig
from fastdiff.errors import ConfigError, require

_TYPES = (int, float, bool, str)
_OF_DATA = {"channels": 1, "size": 8, "classes": 0}
"""Fields of every configuration, with their values for a constructor that does not take them."""
_TAKEN = ("kind", "family", "title")
FAMILIES = "fastdiff.models.plain.family"
"""Module whose attributes are the families of plain networks, by kind."""

modules: dict[str, type[Any]] = {}
"""The plain networks of this process by the name of their family, which differs between versions of a file."""


def config_of(network: type[Any], flag: str) -> type[ModelConfig]:
    """Make the type of a network's configuration; ConfigError: an argument has no default, or another type."""
    kind = str(getattr(network, "kind", network.__name__.lower()))
    require(kind.isidentifier(), f"{flag}: its kind is {kind!r}, expected a name of letters, digits and _")
    arguments = _OF_DATA | _arguments(network, flag)
    family = f"{network.__module__}_{network.__name__}".replace(".", "_")
    modules[family] = network
    made: type[ModelConfig] = make_dataclass(
        f"{network.__name__}Config",
        [
            ("kind", Literal[kind], field(default=kind)),  # type: ignore[valid-type]
            *((name, type(value), field(default=value)) for name, value in arguments.items()),
        ],
        bases=(ModelConfig,),
        frozen=True,
        kw_only=True,
        slots=True,
        namespace={
            "__doc__": inspect.getdoc(network) or f"The network {network.__name__}.",
            "__module__": network.__module__,
            "family": f"{FAMILIES}:{family}",
            "title": f"a {network.__name__}",
            "__annotations__": {"family": ClassVar[str], "title": ClassVar[str]},
        },
    )
    setattr(sys.modules[network.__module__], made.__name__, made)  # where pickle looks for it, between ranks
    return made


def arguments_of(config: ModelConfig) -> dict[str, Any]:
    """Return the arguments of the constructor of a plain network."""
    network = modules[config.family.rpartition(":")[2]]
    taken = inspect.signature(network.__init__).parameters
    return {name: getattr(config, name) for name in config.__dataclass_fields__ if name in taken}


def _arguments(network: type[Any], flag: str) -> dict[str, Any]:
    """Return the defaults of the arguments of a constructor."""
    try:
        hints = get_type_hints(network.__init__)
    except (NameError, TypeError) as error:
        raise ConfigError(f"{flag}: the types of its constructor cannot be read ({error})") from None
    found = {}
    for name, parameter in list(inspect.signature(network.__init__).parameters.items())[1:]:
        typed, default = hints.get(name), parameter.default
        require(
            name not in _TAKEN, f"{flag}: its constructor has the argument {name}, a name of fastdiff's own; rename it"
        )
        require(
            parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            and typed in _TYPES
            and default is not parameter.empty,
            f"{flag}: its constructor has the argument {parameter}; expected a type (int, float, bool or str) and a "
            f"default, as in {name}: int = 8",
        )
        found[name] = typed(default) if typed is float else default
    return found
