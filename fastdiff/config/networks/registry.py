"""Base class of the network configurations, and the registry of the networks. This module imports no torch.

A network is registered by its configuration, a frozen dataclass derived from ``ModelConfig`` that names its family
(``fastdiff.models.family``). The networks of this package are listed in ``_BUILT_IN``. A network of another package is
found by its entry point, so that every command knows it:

    [project.entry-points."fastdiff.networks"]
    toy = "toy_network.config:ToyConfig"

In place of a configuration it may name a plain ``torch.nn.Module`` (``plain``). Within one process
``register(ToyConfig)`` is enough, and ``user_defined.add_network`` registers the network of a file.
"""

import dataclasses
from collections.abc import Mapping
from functools import cache, reduce
from importlib.metadata import EntryPoint
from operator import or_
from pkgutil import resolve_name
from typing import Annotated, Any, ClassVar, Self, TypeVar

from fastdiff.conditions import Shape, of_source
from fastdiff.config.networks.routing import Route
from fastdiff.config.sections.objective import FlowConvention
from fastdiff.errors import ConfigError, require
from fastdiff.plugins.user_code import Group, Installed, load_installed

_BUILT_IN = (
    "fastdiff.config.networks.dit:DiTConfig",
    "fastdiff.config.networks.unet:UNetConfig",
    "fastdiff.config.networks.adm:AdmConfig",
    "fastdiff.config.networks.pixart:PixArtConfig",
    "fastdiff.config.networks.flux2:Flux2Config",
    "fastdiff.config.networks.z_image:ZImageConfig",
    "fastdiff.config.networks.qwen_image:QwenImageConfig",
    "fastdiff.config.networks.sd3:SD3Config",
)
ENTRY_POINTS: Group = "fastdiff.networks"
"""Group of the entry points (``module:CONFIGURATION``) of networks from other packages."""
_OF_PLAIN = "fastdiff.config.networks.plain:config_of"


class ModelConfig:
    """Shape of a network, and the properties that a run needs before the network is built.

    The configuration of a network is a frozen dataclass with ``kw_only`` and ``slots`` that derives from this class. It
    has fields ``kind`` (``Literal["toy"] = "toy"``, its name in files and checkpoints), ``channels`` and ``size``, and
    every other field has a default. It overrides the attributes below where they differ, as fields if the user sets
    them.
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]

    kind: str
    channels: int
    """Channels of the latents or images."""
    size: int
    """Height and width of the latents or images."""
    classes: int = 0
    """Number of classes; the label with this number is the null class."""
    learn_sigma: bool = False
    """Whether the output channels are doubled; the second half predicts the variance."""
    low_res_size: int = 0
    """Height and width of the low-resolution input (super-resolution); 0: none."""
    teacher_width: int = 0
    """Width of the class token of a teacher, which is noised and predicted beside the latents; 0: none. The condition
    teacher_token is then the noisy one, and the network returns a prediction of the latents and one of the token."""
    aligned_width: int = 0
    """Width of the features of a teacher, with which those of a block are aligned in training; 0: none."""
    aligned_token: bool = False
    """Whether the class token of the teacher is among the aligned ones, in front of the patches."""
    references: int = 0
    """Pictures that each picture refers to, whose latents are an input."""
    hidden: int = 0
    """Width of a token, of a network with ``base_width``."""
    base_width: int = 0
    """Width of the network whose learning rate is given (muP); 0: one rate for all parameters."""

    family: ClassVar[str]
    """``module:NAME`` of the network's ``fastdiff.models.family.ModelFamily``, imported on first use."""
    title: ClassVar[str]
    """Name of the network in messages, with an article: ``a DiT``."""
    lora_targets: ClassVar[tuple[str, ...]] = ()
    """Suffixes of the names of the layers that LoRA adapts by default; empty: LoRA is not supported."""
    in_pixels: ClassVar[bool] = False
    """Whether the network works on pixels. If the data are not at hand, its samples are treated as images."""
    needs_classes: ClassVar[bool] = False
    """Whether a class-conditional network needs data with classes, because it has no weights for the null class."""
    flow_convention: ClassVar[FlowConvention | None] = None
    """Time and velocity of the network in flow matching, its only process; None: it takes any process."""
    any_size: ClassVar[bool] = False
    """Whether the network takes any height and width divisible by ``smallest_factor``, not only ``size``."""
    hidden_matrices: ClassVar[tuple[str, ...]] = ()
    """Ends of the names of the weights of which both sides grow with the width, in a network with ``base_width``."""

    diffusers_class: ClassVar[str] = ""
    """Class of the network in pipelines of diffusers; empty: no pipeline has it. Otherwise the configuration has
    ``from_diffusers`` and ``to_diffusers``, and the network the class's names of weights."""
    former_diffusers_classes: ClassVar[tuple[str, ...]] = ()
    """Classes that had it in earlier versions of diffusers, which published pipelines still name."""
    undescribed: ClassVar[tuple[str, ...]] = ()
    """Fields that the class's ``config.json`` lacks: the data set decides them for pretrained weights, too."""
    diffusers_call: ClassVar[Mapping[str, bool]] = {}
    """Arguments besides the prompt with which a pipeline of diffusers draws images of the size of the run, from prompts
    as its captions were read."""

    takes_references: ClassVar[bool] = False
    """Whether the network has a field ``references``, which may be any number."""
    text_fields: ClassVar[Mapping[str, str]] = {}
    """Field with the width of each caption embedding, by the name of the condition."""
    text_length: ClassVar[str] = ""
    """Field with the tokens of a caption, of a network that takes captions of any length with masks; empty: none."""

    @property
    def route(self) -> Route | None:
        """Tokens that are left out in training; None: none are."""
        return None

    @property
    def has_sparse_path(self) -> bool:
        """Whether the network can do without the output of the blocks that leave tokens out.

        Its condition sparse_path says which samples have that output.
        """
        return self.route is not None and self.route.path_drop is not None

    @property
    def guided_without_path(self) -> bool:
        """Whether the network has learned to do without this output, as guidance then does for its unconditional part.

        Park et al. 2025, arXiv:2510.21986 (path-drop guidance).
        """
        return self.route is not None and bool(self.route.path_drop)

    @property
    def aligned_shape(self) -> Shape:
        """Shape of these features, ``(aligned_width, rows, columns)``; empty: there are none."""
        return ()

    @property
    def smallest_factor(self) -> int:
        """Required divisor of height and width."""
        return 1

    @property
    def conditions(self) -> Mapping[str, Shape]:
        """Shape of one sample of each input besides noisy latents and time, by its name in ``fastdiff.conditions``.

        Captions of another length are accepted; this length is that of plans and passes without data.
        """
        return {"label": ()}

    @property
    def text_conditional(self) -> bool:
        """Whether the network is conditioned on captions instead of classes."""
        return bool(of_source("caption", self.conditions))

    @property
    def width_ratio(self) -> float:
        """Width relative to ``base_width``; 1 without one."""
        return self.hidden / self.base_width if self.base_width else 1.0

    def lr_multiplier(self, name: str) -> float:
        """Return the factor of the learning rate of a parameter for an optimizer whose updates are as large as Adam's.

        It is 1 / ``width_ratio`` for hidden matrices (Yang et al. 2022, arXiv:2203.03466, table 3), otherwise 1.
        """
        return 1.0 / self.width_ratio if self.is_hidden_matrix(name) else 1.0

    def is_hidden_matrix(self, name: str) -> bool:
        """Return whether a parameter of this name is one of ``hidden_matrices``."""
        return any(f".{name}".endswith(f".{end}") for end in self.hidden_matrices)

    def at_size(self, height: int, width: int) -> Self:
        """Return the configuration for maps of this size, for counting operations."""
        return self

    def completed(self, given: "ModelConfig") -> Self:
        """Return the network of a pipeline with the fields that this does not describe, as given for such a network."""
        if type(given) is not type(self):
            return self
        return dataclasses.replace(self, **{name: getattr(given, name) for name in self.undescribed})

    def problem_in(self, pipeline: str) -> str | None:
        """Return why pipelines of this class of diffusers cannot draw with the network, or None."""
        return None

    @classmethod
    def from_diffusers(cls, config: Mapping[str, Any]) -> Self:
        """Return the configuration in the class's ``config.json``; ConfigError names an entry of no such network."""
        raise NotImplementedError

    def to_diffusers(self) -> dict[str, Any]:
        """Return the entries of the class's ``config.json`` that describe this network."""
        raise NotImplementedError

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Accept every registered network for ``ModelConfig``, discriminated by ``kind``."""
        if cls is not ModelConfig:
            return handler(source)
        from pydantic import Field

        return handler.generate_schema(Annotated[reduce(or_, networks().values()), Field(discriminator="kind")])


Configuration = TypeVar("Configuration", bound=ModelConfig)
_registered: dict[str, type[ModelConfig]] = {}


def register(config: type[Configuration], *, instead: type[ModelConfig] | None = None) -> type[Configuration]:
    """Register a network by the type of its configuration and return the type; usable as a decorator.

    Args:
        config: the type.
        instead: type that it replaces, of an earlier version of the same file.

    Raises:
        ConfigError: another network has this kind, or the type lacks a required field.
    """
    kind = _kind_of(config)
    known = _registered.setdefault(kind, config)
    if known is instead:
        known = _registered[kind] = config
    require(
        known is config,
        f"two networks have the kind {kind!r}: {known.__module__}.{known.__qualname__} and "
        f"{config.__module__}.{config.__qualname__}; rename one",
    )
    return config


def _kind_of(config: type[ModelConfig]) -> str:
    fields = {field.name: field.default for field in dataclasses.fields(config)}
    kind = fields.get("kind")
    require(
        isinstance(kind, str) and fields.keys() >= {"channels", "size"} and bool(getattr(config, "family", "")),
        f"{config.__module__}.{config.__qualname__} cannot be registered: it needs a field kind with its name as the "
        "default, fields channels and size, and the name of its family",
    )
    return str(kind)


def networks() -> dict[str, type[ModelConfig]]:
    """Return the configuration type of every network by kind: built in, installed, or registered by this process."""
    return {**_built_in(), **{kind: config for kind, (_, config) in _installed().found.items()}, **_registered}


def entry_point_of(kind: str) -> EntryPoint | None:
    """Return the entry point of an installed network; None: the network is of no package but this one."""
    point, config = _installed().found.get(kind, (None, None))
    return point if config is networks().get(kind) else None


def network_called(kind: object, source: str) -> type[ModelConfig]:
    """Return the configuration type of the network of this kind; ConfigError, with ``source``, if it is unknown."""
    known = networks()
    if not isinstance(kind, str) or kind not in known:
        unknown = (
            f"{source}: model.kind: not a known network, given {kind!r}; expected {', '.join(known)}, or install the "
            f"package that registers it under the entry points {ENTRY_POINTS}, or name its file: PATH.py:NAME"
        )
        raise ConfigError("; ".join([unknown, *_installed().wrong]))
    return known[kind]


def network_of_class(name: str, pipeline: str) -> type[ModelConfig]:
    """Return the configuration type of a network by its class in diffusers; ConfigError, with ``pipeline``: unknown."""
    found = networks().values()
    known = {config.diffusers_class: config for config in found if config.diffusers_class}
    known |= {former: config for config in found for former in config.former_diffusers_classes if former not in known}
    if name not in known:
        unknown = (
            f"{pipeline} has a network of class {name}; expected {' or '.join(known)}, or install the package that "
            f"registers it under the entry points {ENTRY_POINTS}"
        )
        raise ConfigError("; ".join([unknown, *_installed().wrong]))
    return known[name]


@cache
def _built_in() -> dict[str, type[ModelConfig]]:
    found = [register(resolve_name(name)) for name in _BUILT_IN]
    return {config().kind: config for config in found}


@cache
def _installed() -> Installed[str, type[ModelConfig]]:
    return load_installed(ENTRY_POINTS, "network", _checked, _built_in())


def _checked(config: Any, title: str) -> tuple[str, type[ModelConfig]]:
    require(isinstance(config, type), f"{title} is a {type(config).__name__}, expected a class")
    if not issubclass(config, ModelConfig):
        config = resolve_name(_OF_PLAIN)(config, title)
    return _kind_of(config), config
