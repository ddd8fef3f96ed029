"""Base class of the configurations of diffusers' transformers, whose fields are the entries of their config.json.

This module imports no torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from fastdiff.config.networks.registry import ModelConfig
from fastdiff.errors import ConfigError, require


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusersTransformerConfig(ModelConfig):
    """Shape of a transformer that diffusers computes.

    A field has the name of its entry in ``config.json``, unless ``renamed`` gives another, or the file lacks it.
    """

    any_size: ClassVar[bool] = True
    text_fields: ClassVar[Mapping[str, str]] = {}
    undescribed: ClassVar[tuple[str, ...]] = ("size", "caption_tokens")
    renamed: ClassVar[Mapping[str, str]] = {"channels": "in_channels"}
    """Entry of each field with another name."""
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Entries with one supported value each."""
    from_zero: ClassVar[tuple[str, ...]] = ()
    """Fields with numbers counted from 0; all others are above 0."""
    ignored: ClassVar[tuple[str, ...]] = ()
    """Entries that change nothing in the network."""

    def __post_init__(self) -> None:
        for name, value in self._entries().items():
            least = 0 if name in self.from_zero else math.ulp(0)
            numbers = [number for number in _numbers(value) if not least <= number < math.inf]
            require(not numbers, f"--model.{name} {value}: {'at least' if least == 0 else 'above'} 0")
        require(
            self.size % self.smallest_factor == 0,
            f"--model.size {self.size} must be divisible by {self.smallest_factor}, the patch of {self.title}",
        )

    @property
    def head_dim(self) -> int:
        """Channels of an attention head."""
        raise NotImplementedError

    @property
    def derived(self) -> Mapping[str, Any]:
        """Entries that follow from the fields."""
        return {}

    def at_size(self, height: int, width: int) -> Self:
        """Return the configuration for a square of about the same area."""
        side = round(math.sqrt(height * width) / self.smallest_factor)
        return replace(self, size=self.smallest_factor * max(1, side))  # type: ignore[call-arg]  # a field of each

    @classmethod
    def from_diffusers(cls, config: Mapping[str, Any]) -> Self:
        """Return the configuration in ``transformer/config.json``; ConfigError names an entry of no such network."""
        ours = {cls.renamed.get(name, name): name for name in cls._names()}
        found = {}
        for entry, value in config.items():
            if entry.startswith("_") or entry in cls.ignored:
                continue
            value = tuple(value) if isinstance(value, list) else value
            if entry in cls.fixed:
                if value != cls.fixed[entry]:
                    raise cls._refused(entry, value, repr(cls.fixed[entry]))
            else:
                found[ours.get(entry, entry)] = value
        described = {name: found.pop(name) for name in set(found) - set(ours.values())}
        made = cls(**found)
        for entry, value in described.items():
            expected = repr(made.derived[entry]) if entry in made.derived else "no such entry"
            if expected != repr(value):
                raise cls._refused(entry, value, expected)
        return made

    def to_diffusers(self) -> dict[str, Any]:
        """Return the entries of ``transformer/config.json`` that describe this network."""
        own = {self.renamed.get(name, name): value for name, value in self._entries().items()}
        named = {**self.fixed, **own, **self.derived}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in named.items()}

    def _entries(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names()}

    @classmethod
    def _names(cls) -> list[str]:
        return [field.name for field in fields(cls) if field.name not in ("kind", *cls.undescribed)]

    @classmethod
    def _refused(cls, entry: str, value: Any, expected: str) -> ConfigError:
        return ConfigError(
            f"the transformer's config.json has {entry} {value!r}, expected {expected}, for {cls.title}; another "
            "variant of this network is not supported"
        )


def _numbers(value: Any) -> list[float]:
    """Return the numbers of an entry; a bool is none."""
    values = value if isinstance(value, tuple) else (value,)
    return [each for each in values if isinstance(each, int | float) and not isinstance(each, bool)]
