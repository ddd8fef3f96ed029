"""Code of the user: an object named as ``PATH.py:NAME`` (the file is executed) or by an entry point.

A file is executed only if the user names it on the command line, in a ``--config`` file or in Python; what a run folder
or a data set names is never executed. This module imports no torch.
"""

import hashlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, Literal, TypeVar

from fastdiff.console import log
from fastdiff.errors import ConfigError, FastdiffError, explained
from fastdiff.files import read_bounded
from fastdiff.version import PACKAGE

Group = Literal[
    "fastdiff.networks",
    "fastdiff.optimizers",
    "fastdiff.encoders",
    "fastdiff.sources",
    "fastdiff.objectives",
    "fastdiff.callbacks",
    "fastdiff.metrics",
    "fastdiff.features",
]
"""Groups of the entry points of plug-ins in packages."""
Key = TypeVar("Key")
Found = TypeVar("Found")
_LARGEST = 1 << 20
"""Maximum size of a file, in bytes."""
_MODULE = "fastdiff_plugin_"


@dataclass(frozen=True, slots=True)
class Plugin:
    """An object of the user, with its identity."""

    text: str
    """As it was named: ``PATH.py:NAME``, or the name of an entry point."""
    found: Any
    """The object."""
    identity: str
    """``NAME sha256 DIGEST`` of the file, or ``NAME of PACKAGE VERSION``: equal for equal code."""
    path: Path | None = None
    """The file; None: an installed package."""

    @contextmanager
    def blamed(self, what: str, error_type: type[FastdiffError] = ConfigError) -> Iterator[None]:
        """Turn an exception of the user's code into one message with its line.

        Args:
            what: the flag, or the call in words.
            error_type: of the message; an error after the first step is none of the flags.

        Raises:
            FastdiffError: ``error_type``: the code inside raised an exception that is not of fastdiff.
        """
        try:
            yield
        except FastdiffError:
            raise
        except Exception as error:
            raise error_type(f"{what}: {self._place(error)}: {type(error).__name__}: {error}") from error

    def _place(self, error: Exception) -> str:
        if self.path is None:
            return self.text
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename) == self.path.absolute()]
        if isinstance(error, SyntaxError) and not lines:
            lines = [error.lineno]
        return f"{self.path}:{lines[-1]}" if lines else str(self.path)


def names_file(text: str) -> bool:
    """Return whether ``text`` is ``PATH.py:NAME``."""
    path, _, name = text.rpartition(":")
    return path.endswith(".py") and name.isidentifier()


def load(text: str, group: Group, flag: str) -> Plugin:
    """Execute the file, or import the package, that ``text`` names, and return its object.

    Args:
        text: ``PATH.py:NAME``, or the name of an entry point.
        group: group of the entry points.
        flag: origin of ``text``, for messages.

    Raises:
        ConfigError: there is no such file, object or entry point, or its code raises an exception.
    """
    return _of_file(text, flag) if names_file(text) else _of_package(text, group, flag)


def identity_of(text: str, group: Group, flag: str) -> str:
    """Return the ``Plugin.identity`` of what ``text`` names, unexecuted; ConfigError: no such file or entry point."""
    if names_file(text):
        return _identity_of_file(text, _source(text, flag))
    return _identity_of_point(_point(text, group, flag))


def installed(group: Group) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name."""
    return {point.name: point for point in entry_points(group=group)}


@dataclass(frozen=True, slots=True)
class Installed(Generic[Key, Found]):
    """What installed packages register in a group."""

    found: dict[Key, tuple[EntryPoint, Found]]
    """By the name under which it is used."""
    wrong: tuple[str, ...]
    """What is wrong with the other packages, whose names are unknown; they stop nothing else."""

    def identity_of(self, name: Key, used: Found) -> str | None:
        """Return the ``Plugin.identity`` of what is used under a name; None: it is of no package but this one."""
        point, found = self.found.get(name, (None, None))
        return None if point is None or found is not used else _identity_of_point(point)


def load_installed(
    group: Group,
    what: str,
    check: Callable[[Any, str], tuple[Key, Found]],
    built_in: Collection[Key],
    shown: Callable[[Key], str] = str,
) -> Installed[Key, Found]:
    """Import the packages with entry points of a group. An object under several entry points is known by the first one.

    Args:
        group: of the entry points.
        what: they register, for messages: ``optimizer``.
        check: returns an object under its name, or raises ConfigError; it gets the object and its title for messages.
        built_in: names of this package; a warning tells of a package that registers one, and its object is not used.
        shown: returns a name as messages show it.
    """
    found: dict[Key, tuple[EntryPoint, Found]] = {}
    objects: list[Any] = []
    wrong, taken = [], set()
    for point in entry_points(group=group):
        title = f"the {what} {point.name} of {_package_of(point)}"
        try:
            given = _imported(point, title)
            if any(given is one for one in objects):
                continue
            objects.append(given)
            name, value = check(given, title)
            if name in built_in:
                raise _taken_from_fastdiff(f"{title} registers {shown(name)}, which is of fastdiff; rename it")
            other = found.setdefault(name, (point, value))[0]
            if other is not point:
                taken.add(name)
                both = f"the {what} {other.name} of {_package_of(other)} and {title}"
                raise ConfigError(f"{both} both register {shown(name)}; rename or uninstall one")
        except Exception as error:  # also of the code of the package
            known = isinstance(error, ConfigError)
            wrong.append(str(error) if known else f"{title} cannot be registered ({error!r}); repair that package")
    return Installed({name: each for name, each in found.items() if name not in taken}, tuple(wrong))


def _taken_from_fastdiff(message: str) -> ConfigError:
    """Return the error after a warning: the name is known, so nothing else would tell."""
    if os.environ.get("RANK", "0") == "0":
        log.warning(message)
    return ConfigError(message)


def _package_of(point: EntryPoint) -> str:
    """Return the name of the package of an entry point."""
    return point.dist.name if point.dist else "a package"


def _imported(point: EntryPoint, title: str) -> Any:
    try:
        return point.load()
    except Exception as error:  # of the code of the package
        raise ConfigError(f"{title} cannot be imported ({error}); repair or uninstall that package") from None


@contextmanager
def faults_of(what: str, exhausted: Callable[[Exception], object]) -> Iterator[None]:
    """Turn an exception of ``what``, code of a package, into one message with its line.

    Those of fastdiff, of the file system and of a limit of threads have a message of their own.

    Args:
        what: the flag, or the call in words.
        exhausted: says of an exception whether memory ran out; such a one is left as it is.

    Raises:
        ConfigError: instead of the exception.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, FastdiffError) or explained(error) is not error or exhausted(error):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        torch = importlib.util.find_spec("torch")
        others = {PACKAGE, *map(Path, torch.submodule_search_locations or () if torch else ())}
        frame = ([one for one in frames if others.isdisjoint(Path(one.filename).parents)] or frames)[-1]
        raise ConfigError(
            f"{what} raises {type(error).__name__} ({error}) at {frame.filename}:{frame.lineno}; mend that code"
        ) from error


def _of_file(text: str, flag: str) -> Plugin:
    path, name = _split(text)
    source = _source(text, flag)
    identity = _identity_of_file(text, source)
    # One module per path and content, of the same name on all ranks: a file that is named twice is executed once.
    module_name = _MODULE + hashlib.sha256(bytes(path.absolute()) + b"\0" + source).hexdigest()[:16]
    module = sys.modules.get(module_name) or _execute(Plugin(text, None, identity, path), source, module_name, flag)
    if not hasattr(module, name):
        raise ConfigError(f"{flag} {text}: {path} has no {name}")
    return Plugin(text, getattr(module, name), identity, path)


def _execute(plugin: Plugin, source: bytes, name: str, flag: str) -> ModuleType:
    """Execute the bytes that the identity digests; the file may have changed since, and its cache may be older."""
    assert plugin.path is not None
    spec = importlib.util.spec_from_file_location(name, plugin.path.absolute())
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where classes of the file look up their module
    try:
        with plugin.blamed(flag):
            exec(compile(source, plugin.path.absolute(), "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _of_package(text: str, group: Group, flag: str) -> Plugin:
    point = _point(text, group, flag)
    return Plugin(text, _imported(point, f"{flag} {text}: {_package_of(point)}"), _identity_of_point(point))


def _point(text: str, group: Group, flag: str) -> EntryPoint:
    known = installed(group)
    if text not in known:
        there = f"installed: {', '.join(sorted(known))}" if known else f"no package with entry points {group}"
        raise ConfigError(f"{flag} {text}: expected PATH.py:NAME, or the name of an installed plug-in ({there})")
    return known[text]


def _source(text: str, flag: str) -> bytes:
    path, _ = _split(text)
    try:
        return read_bounded(path, _LARGEST)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{flag} {text}: {path} cannot be read ({error}); expected PATH.py:NAME") from error


def _split(text: str) -> tuple[Path, str]:
    path, _, name = text.rpartition(":")
    return Path(path), name


def _identity_of_file(text: str, source: bytes) -> str:
    return f"{_split(text)[1]} sha256 {hashlib.sha256(source).hexdigest()}"


def _identity_of_point(point: EntryPoint) -> str:
    package = f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown package"
    return f"{point.name} of {package}"
