"""Export formats: the ones of every network, and lookup of the ones of a network.

A family names its formats (``ModelFamily.formats``) by ``module:NAME`` of an ``ExportFormat``, so a network of another
package brings its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

import torch

from fastdiff.checkpoint.reader import Checkpoint
from fastdiff.checkpoint.safetensors_writer import write_tensors
from fastdiff.config.networks.registry import ModelConfig, networks
from fastdiff.config.run import RunConfig
from fastdiff.errors import ConfigError
from fastdiff.export.card_text import Place, load_safetensors
from fastdiff.export.weights import ExportedWeights
from fastdiff.models.family import family_of


@dataclass(frozen=True, slots=True)
class Exported:
    """The content of an export."""

    saved: Checkpoint | None
    """The exported checkpoint; None: a published file of weights, which no training format supports."""
    config: RunConfig
    """The configuration of the run."""
    weights: ExportedWeights
    """The selected weights."""
    dtype: torch.dtype
    """Dtype of the files."""

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint, for a format of a training."""
        assert self.saved is not None
        return self.saved


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportFormat:
    """A file format."""

    write: Callable[[Path, Exported], None]
    """Writes the files to an existing empty folder; raises ConfigError, StorageError or OSError."""
    use: Callable[[RunConfig, Place, int], str]
    """Returns Markdown code that uses the files; the number is the checkpoint step, which file names may contain."""
    library: str = ""
    """Library that reads the files, by its name on the Hugging Face hub."""
    adapter: bool = False
    """Whether it holds only the adapter; other formats merge it into the weights."""
    training: bool = False
    """Whether it holds the full training state in fp32: weights, average and optimizer."""
    every_average: bool = False
    """Whether a full training state holds every average of constant rate instead of the selected one."""


def formats_of(model: ModelConfig | type[ModelConfig]) -> dict[str, str]:
    """Return the formats of a network as ``module:NAME`` by name, its own first; of a type, those without options."""
    family = family_of(model)
    has_options = not isinstance(model, type) and bool(family.options(model))
    found = {} if has_options else dict(family.formats)
    if model.lora_targets:
        found.setdefault("lora", "fastdiff.export.adapters:LORA")
    found.setdefault("safetensors", f"{__name__}:PLAIN")
    return found


def format_of(model: ModelConfig, name: str) -> ExportFormat:
    """Return the format of a network by name; ConfigError, which lists its formats, if it has no such one."""
    found = formats_of(model)
    if name in found:
        form = resolve_name(found[name])
        if not isinstance(form, ExportFormat):
            raise ConfigError(f"{found[name]} is a {type(form).__name__}, expected an ExportFormat")
        return form
    if name in family_of(model).formats:
        options = family_of(model).options(model)
        raise ConfigError(f"--format {name}: its network lacks {options} of the run; use safetensors")
    owners = [network.title for network in networks().values() if name in formats_of(network)]
    *others, last = [known for known in found if not known.startswith("lora")]
    raise ConfigError(
        f"--format {name} is for {' and '.join(owners) or 'no network'}, the run has {model.title}; use "
        + (f"{', '.join(others)} or {last}" if others else last)
    )


def _write_plain(folder: Path, exported: Exported) -> None:
    weights, dtype = exported.weights, exported.dtype
    write_tensors(folder / "model.safetensors", weights.shapes, dtype, weights.reader(dtype))


PLAIN = ExportFormat(
    write=_write_plain,
    use=lambda config, place, step: load_safetensors(config.model, config.objective, place, "model.safetensors"),
)
