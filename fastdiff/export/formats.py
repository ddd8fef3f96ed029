"""Formats that a run is exported in: those of every network, and how those of one network are found.

A family names its formats (``ModelFamily.formats``) by ``module:NAME`` of an ``ExportFormat``, so a network from
another package brings its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

import torch

from fastdiff.checkpoint.reader import Checkpoint
from fastdiff.checkpoint.safetensors_writer import write_tensors
from fastdiff.config.networks.registry import ModelConfig, networks
from fastdiff.config.run import RunConfig
from fastdiff.errors import ConfigError, StorageError
from fastdiff.export.card_text import Place, load_safetensors
from fastdiff.export.weights import ExportedWeights
from fastdiff.models.family import family_of

_ADAPTER = "pytorch_lora_weights.safetensors"


@dataclass(frozen=True, slots=True)
class Exported:
    """What is written."""

    saved: Checkpoint
    """The checkpoint."""
    config: RunConfig
    """The run's."""
    weights: ExportedWeights
    """Those that were chosen of it."""
    dtype: torch.dtype
    """Of the files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportFormat:
    """A format of files."""

    write: Callable[[Path, Exported], None]
    """Writes them to a folder that exists and is empty; raises ConfigError, StorageError or OSError."""
    use: Callable[[RunConfig, Place, int], str]
    """Code, in Markdown, that uses them; the number is the step of the checkpoint, which may be in their names."""
    library: str = ""
    """The library that reads them, as the Hugging Face hub calls it."""
    adapter: bool = False
    """Whether it has the adapter alone, where others have it merged into the weights."""
    training: bool = False
    """Whether it has all of a training, in fp32: weights, average and optimizer."""
    every_average: bool = False
    """Of a training: every average of a constant rate, not the one that is chosen."""


def formats_of(model: ModelConfig | type[ModelConfig]) -> dict[str, str]:
    """Names of the formats of a network, its own first, with the ``module:NAME`` of each."""
    found = dict(family_of(model).formats)
    if model.lora_targets:
        found.setdefault("lora", f"{__name__}:LORA")
    found.setdefault("safetensors", f"{__name__}:PLAIN")
    return found


def format_of(model: ModelConfig, name: str) -> ExportFormat:
    """The format of a network that is called so.

    Raises:
        ConfigError: the network has no such format; names those that it has.
    """
    found = formats_of(model)
    if name in found:
        form = resolve_name(found[name])
        if not isinstance(form, ExportFormat):
            raise ConfigError(f"{found[name]} is a {type(form).__name__}, expected an ExportFormat")
        return form
    owners = [network.title for network in networks().values() if name in formats_of(network)]
    *others, last = [known for known in found if known != "lora"]
    raise ConfigError(
        f"--format {name} is for {' and '.join(owners) or 'no network'}, the run has {model.title}; use "
        + (f"{', '.join(others)} or {last}" if others else last)
    )


def write_lora(folder: Path, exported: Exported) -> None:
    """Write the adapter.

    Raises:
        StorageError: it could not be written.
    """
    from safetensors import SafetensorError, safe_open

    from fastdiff.models.lora import save_lora

    dtype, weights, config = exported.dtype, exported.weights, exported.config
    read = weights.reader(dtype)
    try:
        file = save_lora(folder, {name: read(name).to(dtype) for name in weights.shapes}, config.lora, config.model)
    except SafetensorError as error:
        raise StorageError(f"{folder}: the adapter could not be written ({error}); make room") from None
    # Again, because the library writes the entries of the metadata in another order each time.
    with safe_open(file, framework="pt") as saved:
        metadata, keys = saved.metadata(), saved.keys()
        shapes = {name: tuple(saved.get_slice(name).get_shape()) for name in keys}
        write_tensors(folder / "sorted.safetensors", shapes, dtype, saved.get_tensor, metadata)
    (folder / "sorted.safetensors").replace(file)


def _write_plain(folder: Path, exported: Exported) -> None:
    weights, dtype = exported.weights, exported.dtype
    write_tensors(folder / "model.safetensors", weights.shapes, dtype, weights.reader(dtype))


PLAIN = ExportFormat(
    write=_write_plain, use=lambda config, place, step: load_safetensors(config, place, "model.safetensors")
)
LORA = ExportFormat(
    write=write_lora, use=lambda config, place, step: load_safetensors(config, place, _ADAPTER), adapter=True
)
