"""What every network's configuration says, and the registry of the networks. This module imports no torch.

A network is registered by its configuration, a frozen dataclass derived from ``ModelConfig``; that names its family
(``fastdiff.models.family``), which everything else is asked of. The networks of this package are rows of ``_BUILT_IN``.
One from another package is found by its entry point, so that every command knows it:

    [project.entry-points."fastdiff.networks"]
    toy = "toy_network.config:ToyConfig"

Within one process ``register(ToyConfig)`` does as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache, reduce
from importlib.metadata import entry_points
from operator import or_
from pkgutil import resolve_name
from typing import Annotated, Any, ClassVar, Self, TypeVar

from fastdiff.errors import ConfigError, require

_BUILT_IN = (
    "fastdiff.config.networks.dit:DiTConfig",
    "fastdiff.config.networks.unet:UNetConfig",
    "fastdiff.config.networks.adm:AdmConfig",
)
ENTRY_POINTS = "fastdiff.networks"
"""Group of the entry points that other packages register their networks by: ``module:CONFIGURATION`` each."""


class ModelConfig:
    """Shape of a network, and what a run asks of a network before it is built.

    The configuration of a network is a frozen dataclass with ``kw_only`` and ``slots`` that derives from this one. It
    has fields ``kind`` (``Literal["toy"] = "toy"``, by which files and checkpoints name it), ``channels`` and ``size``,
    and every other field has a default. Of the attributes below it overrides those that differ, as fields where the
    user decides them.
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]

    kind: str
    channels: int
    """Channels of the latents or images."""
    size: int
    """Their height and width."""
    classes: int = 0
    """Number of classes that it is conditioned on; the label of this number stands for no class."""
    learn_sigma: bool = False
    """Whether it has twice the output channels, the second half for the variance."""
    low_res_size: int = 0
    """Height and width of the small images that it enlarges; 0: it is given none."""

    family: ClassVar[str]
    """``module:NAME`` of its ``fastdiff.models.family.ModelFamily``, imported when something is asked of it."""
    title: ClassVar[str]
    """What messages call it, with an article: ``a DiT``."""
    lora_targets: ClassVar[tuple[str, ...]] = ()
    """Ends of the names of the layers that a LoRA adapts unless the user names others; empty: it takes no LoRA."""
    in_pixels: ClassVar[bool] = False
    """Whether it is made for pixels, so that without the data at hand its samples are taken for images."""
    needs_classes: ClassVar[bool] = False
    """Whether it cannot be trained with classes on data without: it has no weights for the label of no class."""
    any_size: ClassVar[bool] = False
    """Whether it takes any height and width that divide by ``smallest_factor``, not ``size`` alone."""

    @property
    def smallest_factor(self) -> int:
        """What height and width must divide by."""
        return 1

    @property
    def text_widths(self) -> Mapping[str, int]:
        """Width of each embedding of a caption that it takes, by the name of the input; empty: it takes classes."""
        return {}

    @property
    def text_conditional(self) -> bool:
        """Whether it is conditioned on captions, not on classes."""
        return bool(self.text_widths)

    def at_size(self, height: int, width: int) -> Self:
        """The network as it computes on maps of this size, for counting operations."""
        return self

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Where any network may stand, the registered ones may, told apart by ``kind``."""
        if cls is not ModelConfig:
            return handler(source)
        from pydantic import Field

        return handler.generate_schema(Annotated[reduce(or_, networks().values()), Field(discriminator="kind")])


Configuration = TypeVar("Configuration", bound=ModelConfig)
_registered: dict[str, type[ModelConfig]] = {}


def register(config: type[Configuration]) -> type[Configuration]:
    """Add a network by the type of its configuration, and return the type; serves as a decorator.

    Raises:
        ConfigError: another network has this kind, or the type says none.
    """
    fields = {field.name: field.default for field in dataclasses.fields(config)}
    kind = fields.get("kind")
    require(
        isinstance(kind, str) and fields.keys() >= {"channels", "size"} and bool(getattr(config, "family", "")),
        f"{config.__module__}.{config.__qualname__} cannot be registered: it needs a field kind with its name as the "
        "default, fields channels and size, and the name of its family",
    )
    assert isinstance(kind, str)
    known = _registered.setdefault(kind, config)
    require(
        known is config,
        f"two networks have the kind {kind!r}: {known.__module__}.{known.__qualname__} and "
        f"{config.__module__}.{config.__qualname__}; rename one",
    )
    return config


def networks() -> dict[str, type[ModelConfig]]:
    """The configuration of every network by its kind: built in, installed, or registered by this process.

    Raises:
        ConfigError: an installed network cannot be imported, or has the kind of another one.
    """
    found = _built_in()
    _installed()
    return {**found, **_registered}


def network_called(kind: object, source: str) -> type[ModelConfig]:
    """The configuration of the network of this kind.

    Raises:
        ConfigError: there is none; ``source`` is where it was asked for.
    """
    known = networks()
    if not isinstance(kind, str) or kind not in known:
        raise ConfigError(
            f"{source}: model.kind: not a known network, given {kind!r}; expected {', '.join(known)}, or install the "
            f"package that has it under the entry points {ENTRY_POINTS}"
        )
    return known[kind]


@cache
def _built_in() -> dict[str, type[ModelConfig]]:
    found = [register(resolve_name(name)) for name in _BUILT_IN]
    return {config().kind: config for config in found}


@cache
def _installed() -> None:
    for point in entry_points(group=ENTRY_POINTS):
        try:
            config = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"the network {point.name} of {point.dist.name if point.dist else 'a package'} cannot be imported "
                f"({error}); repair or uninstall that package"
            ) from None
        register(config)
