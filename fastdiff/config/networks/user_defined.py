"""Networks of the user's files, ``PATH.py:NAME``: registered for this process. This module imports no torch."""

from fastdiff.config.networks.plain import config_of
from fastdiff.config.networks.registry import ModelConfig, entry_point_of, networks, register
from fastdiff.errors import require
from fastdiff.plugins.user_code import Plugin, identity_of, load

_known: dict[str, tuple[Plugin, type[ModelConfig]]] = {}
"""Networks of files by kind."""


def add_network(text: str, flag: str) -> str:
    """Execute a file and register the network that it defines.

    Args:
        text: ``PATH.py:NAME``, the type of a configuration (``ModelConfig``) or a ``torch.nn.Module``.
        flag: origin of ``text``, for messages.

    Raises:
        ConfigError: the file cannot be executed, defines no network of this name, or one whose kind is taken.
    """
    plugin, source = load(text, "fastdiff.networks", flag), f"{flag} {text}"
    found = plugin.found
    same = next((kind for kind, (known, _) in _known.items() if known.found is found), None)
    if same is not None:
        _known[same] = plugin, _known[same][1]
        return same
    require(
        isinstance(found, type) and (issubclass(found, ModelConfig) or hasattr(found, "forward")),
        f"{source}: expected a class derived from torch.nn.Module, or the configuration of a network",
    )
    config = found if issubclass(found, ModelConfig) else config_of(found, source)
    kind = config.__dataclass_fields__["kind"].default
    earlier = _known.get(kind)
    of_same_file = earlier is not None and (earlier[0].path == plugin.path or earlier[0].identity == plugin.identity)
    register(config, instead=earlier[1] if earlier is not None and of_same_file else None)
    _known[kind] = plugin, config
    return str(kind)


def plugin_of(kind: str) -> Plugin | None:
    """Return the plug-in, of a file or of an installed package, that has a kind of network; None: of neither."""
    point = entry_point_of(kind)
    if point is None:
        return file_of(kind)
    return Plugin(point.name, networks()[kind], identity_of(point.name, "fastdiff.networks", "--model.kind"))


def file_of(kind: str) -> Plugin | None:
    """Return the plug-in that registered a kind of network in this process; None: it is of no file."""
    return _known[kind][0] if kind in _known else None
