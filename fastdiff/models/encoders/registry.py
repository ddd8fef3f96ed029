"""Registry of the encoders by the classes that pipelines name.

The encoders of this package are listed in ``_BUILT_IN``. One of another package is found by its entry point:

    [project.entry-points."fastdiff.encoders"]
    toy = "toy_encoders.text:TOY_TEXT"
"""

from functools import cache
from pkgutil import resolve_name
from typing import TypeVar

from fastdiff.conditions import CONDITIONS
from fastdiff.errors import ConfigError
from fastdiff.models.encoders.family import AutoencoderFamily, TextEncoderFamily
from fastdiff.plugins.user_code import Group, each_of

_BUILT_IN = (
    "fastdiff.models.encoders.autoencoder_kl:AUTOENCODER_KL",
    "fastdiff.models.encoders.clip:ONE_CLIP",
    "fastdiff.models.encoders.clip:TWO_CLIPS",
)
ENTRY_POINTS: Group = "fastdiff.encoders"
"""Group of the entry points (``module:RECORD``) by which other packages register encoders."""
Family = TypeVar("Family", AutoencoderFamily, TextEncoderFamily)


def encoder_of(kind: type[Family], classes: tuple[str, ...], pipeline: str) -> Family:
    """Return the record of an autoencoder, or of text encoders, by their classes.

    Raises:
        ConfigError: there is no such record, two have the same classes, or an installed one cannot be imported.
    """
    known = {family.classes: family for family in (*_built_in(), *_installed()) if isinstance(family, kind)}
    if classes not in known:
        raise ConfigError(
            f"{pipeline} has {kind.title} of class {_named(classes)}; expected {' or '.join(map(_named, known))}, or "
            f"install the package that registers it under the entry points {ENTRY_POINTS}"
        )
    return known[classes]


def _require_known_conditions(family: AutoencoderFamily | TextEncoderFamily, package: str) -> None:
    unknown = [name for name in getattr(family, "conditions", ()) if name not in CONDITIONS]
    if unknown:
        raise ConfigError(
            f"{_named(family.classes)} of {package} gives the condition {unknown[0]}; expected {', '.join(CONDITIONS)}"
        )


def _named(classes: tuple[str, ...]) -> str:
    return " with ".join(classes)


@cache
def _built_in() -> tuple[AutoencoderFamily | TextEncoderFamily, ...]:
    return tuple(resolve_name(name) for name in _BUILT_IN)


@cache
def _installed() -> tuple[AutoencoderFamily | TextEncoderFamily, ...]:
    found = {(type(family), family.classes): "fastdiff" for family in _built_in()}
    families = []
    for point, package, family in each_of(ENTRY_POINTS, "encoder"):
        if not isinstance(family, AutoencoderFamily | TextEncoderFamily):
            raise ConfigError(
                f"the encoder {point.name} of {package} is a {type(family).__name__}, expected an AutoencoderFamily or "
                "a TextEncoderFamily; repair or uninstall that package"
            )
        _require_known_conditions(family, package)
        if (other := found.setdefault((type(family), family.classes), package)) != package:
            raise ConfigError(
                f"{other} and {package} both register {family.title} of class {_named(family.classes)}; uninstall one"
            )
        families.append(family)
    return tuple(families)
