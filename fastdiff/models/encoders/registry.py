"""Registry of the encoders by the classes that pipelines name.

The encoders of this package are listed in ``_BUILT_IN``. One of another package is found by its entry point:

    [project.entry-points."fastdiff.encoders"]
    toy = "toy_encoders.text:TOY_TEXT"
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pkgutil import resolve_name
from typing import Any, TypeVar

from fastdiff.conditions import CONDITIONS
from fastdiff.errors import ConfigError, require
from fastdiff.models.cost.memory import exhausted
from fastdiff.models.encoders.family import AutoencoderFamily, TextEncoderFamily
from fastdiff.plugins.user_code import Group, Installed, faults_of, load_installed

_BUILT_IN = (
    "fastdiff.models.encoders.autoencoder_kl:AUTOENCODER_KL",
    "fastdiff.models.encoders.autoencoder_dc:AUTOENCODER_DC",
    "fastdiff.models.encoders.autoencoder_kl_flux2:AUTOENCODER_KL_FLUX2",
    "fastdiff.models.encoders.autoencoder_kl_qwen_image:AUTOENCODER_KL_QWEN_IMAGE",
    "fastdiff.models.encoders.autoencoder_rae:AUTOENCODER_RAE",
    "fastdiff.models.encoders.clip:ONE_CLIP",
    "fastdiff.models.encoders.clip:TWO_CLIPS",
    "fastdiff.models.encoders.gemma:SANA",
    "fastdiff.models.encoders.qwen:FLUX2_KLEIN",
    "fastdiff.models.encoders.qwen:QWEN_IMAGE",
    "fastdiff.models.encoders.qwen:Z_IMAGE",
    "fastdiff.models.encoders.stable_diffusion_3:THREE_ENCODERS",
    "fastdiff.models.encoders.t5:PIXART_ALPHA",
    "fastdiff.models.encoders.t5:PIXART_SIGMA",
)
ENTRY_POINTS: Group = "fastdiff.encoders"
"""Group of the entry points (``module:RECORD``) by which other packages register encoders."""
_Record = AutoencoderFamily | TextEncoderFamily
_Name = tuple[type[_Record], tuple[str, ...], tuple[str, ...]]
"""Kind, classes, and classes of the pipelines (``TextEncoderFamily.pipelines``)."""
Family = TypeVar("Family", AutoencoderFamily, TextEncoderFamily)


def encoder_of(kind: type[Family], classes: tuple[str, ...], pipeline: str, pipeline_class: str = "") -> Family:
    """Return the record of an autoencoder, or of text encoders, by their classes.

    Args:
        kind: of the record.
        classes: of the parts.
        pipeline: path, for messages.
        pipeline_class: its class; a record of this class precedes one of any pipeline.

    Raises:
        ConfigError: there is no such record, or its package is broken.
    """
    others: Installed[_Name, _Record] = _installed()
    both = (*(family for _, family in others.found.values()), *_built_in())
    known = [family for family in both if isinstance(family, kind)]
    here = [family for family in known if family.classes == classes]
    for family in here:
        if pipeline_class in family.pipelines:
            return family
    found = next((family for family in here if not family.pipelines), None)
    if found is None:
        within = f" in a {pipeline_class or 'pipeline without a class'}" if here else ""
        expected = " or ".join(dict.fromkeys(_named(each.classes, each.pipelines) for each in here or known))
        unknown = (
            f"{pipeline} has {kind.title} of class {_named(classes)}{within}; expected {expected}, or install the "
            f"package that registers it under the entry points {ENTRY_POINTS}"
        )
        raise ConfigError("; ".join([unknown, *others.wrong]))
    return found


def package_of(family: _Record) -> str | None:
    """Return the entry point and the package with its version of an installed encoder; None: it is of no package."""
    return _installed().identity_of(_name(family), family)


def faults_in(family: _Record, what: str) -> AbstractContextManager[None]:
    """Turn an exception of the code of an encoder into one message with its line; one of this package keeps its own.

    Args:
        family: the encoder.
        what: the call in words.
    """
    return nullcontext() if family in _built_in() else faults_of(what, exhausted)


def _name(family: _Record) -> _Name:
    return type(family), family.classes, family.pipelines


def _named(classes: tuple[str, ...], pipelines: tuple[str, ...] = ()) -> str:
    return " with ".join(classes) + (f" in a {' or '.join(pipelines)}" if pipelines else "")


@cache
def _built_in() -> tuple[_Record, ...]:
    return tuple(resolve_name(name) for name in _BUILT_IN)


@cache
def _installed() -> Installed[_Name, _Record]:
    built_in = list(map(_name, _built_in()))
    return load_installed(ENTRY_POINTS, "encoder", _checked, built_in, lambda name: _named(*name[1:]))


def _checked(family: Any, title: str) -> tuple[_Name, _Record]:
    if not isinstance(family, AutoencoderFamily | TextEncoderFamily):
        raise ConfigError(f"{title} is a {type(family).__name__}, expected an AutoencoderFamily or a TextEncoderFamily")
    unknown = [name for name in getattr(family, "conditions", ()) if name not in CONDITIONS]
    require(not unknown, f"{title} gives the condition {', '.join(unknown)}; expected {', '.join(CONDITIONS)}")
    return _name(family), family
