"""The files of a LoRA adapter, in the forms of ``models.adapter_files``.

No form is read with the right scale by all programs: kohya's stores alpha as a tensor beside each layer, which
ComfyUI reads, and diffusers for some networks; diffusers' own stores it in the metadata, which only diffusers
reads. So that one has the scale in B, and its alpha is the rank. Each format names the programs that it is for. A layer
that one of them would drop is an error.
"""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fastdiff.checkpoint.safetensors_writer import write_tensors
from fastdiff.config.networks.pretrained import LoraConfig
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.run import RunConfig
from fastdiff.errors import ConfigError, require
from fastdiff.export.card_text import (
    Place,
    base_name,
    drawing,
    from_pretrained,
    load_safetensors,
    python,
    where_base_is,
)
from fastdiff.export.formats import Exported, ExportFormat
from fastdiff.export.weights import Read, base_weights, representable
from fastdiff.models.adapter_files import forms
from fastdiff.models.adapter_files.forms import Change, Form, in_native_layout, tensors_of
from fastdiff.models.adapter_files.native_names import NamedNetwork, named_network
from fastdiff.models.adapter_files.readers import COMFYUI, DIFFUSERS_READER, KOHYA_READER, Reader
from fastdiff.models.adapter_kinds.kind import AdapterKind
from fastdiff.models.adapter_kinds.kinds import kind_of
from fastdiff.models.family import family_of
from fastdiff.models.load import check_base

WEIGHTS_FILE = "pytorch_lora_weights.safetensors"
"""File name of an adapter in a folder, as diffusers expects it."""

_EACH = "--format lora-diffusers for diffusers or lora-native for ComfyUI"
"""Formats that lose no layer and no kind, for messages."""
_MOST = 3
"""Layers that a message names."""
_IN_COMFYUI = f"Put `{WEIGHTS_FILE}` into `models/loras` of ComfyUI, under a name of its own. "

Tensors: TypeAlias = dict[str, Tensor]
Metadata: TypeAlias = dict[str, str]


def _no_base(name: str) -> Tensor:
    raise ValueError(f"{name} is needed, expected a reader of the frozen weights")


def file_of(
    form: Form, weights: Mapping[str, Tensor], config: LoraConfig, model: ModelConfig, base: Read = _no_base
) -> tuple[Tensors, Metadata]:
    """Return tensors and metadata of an adapter in a form.

    Args:
        form: of the file.
        weights: every trained parameter, names as in ``model.named_parameters()``.
        config: configuration of the adapter.
        model: of the network.
        base: returns a frozen weight, for kinds whose files depend on it.
    """
    kind, part, network = kind_of(config), family_of(model).pipeline_part, named_network(model)
    changes = kind.for_form(changes_of(weights, config), form, network, base)
    named = _in_native_layout(changes, network) if form.native else changes
    metadata = kind.metadata(form, part, config, list(changes))
    return tensors_of(form, named, part), metadata


def _in_native_layout(changes: Mapping[str, Change], network: NamedNetwork) -> dict[str, Change]:
    try:
        return in_native_layout(changes, network)
    except ConfigError as error:
        raise ConfigError(f"{error}; use --format lora, which has diffusers' layers") from None


def changes_of(weights: Mapping[str, Tensor], config: LoraConfig) -> dict[str, Change]:
    """Return the change of each layer from the trained parameters of an adapter."""
    return kind_of(config).changes(weights, config)


def reads(reader: Reader, form: Form, model: ModelConfig, kind: AdapterKind[Any]) -> bool:
    """Whether a program reads a kind of adapter of a network in a form."""
    known = reader.reads(form, model.diffusers_class)
    return known and not kind.refused_by(reader, form, model.diffusers_class)


def check_readers(
    form: Form,
    readers: tuple[Reader, ...],
    model: ModelConfig,
    kind: AdapterKind[Any],
    changes: Mapping[str, Change],
) -> None:
    """Raise ConfigError for a kind, or adapted layers, that one of the programs that a format is for would drop."""
    layers, reading = list(changes), [reader for reader in readers if reads(reader, form, model, kind)]
    require(
        bool(reading) or not any(reader.reads(form, model.diffusers_class) for reader in readers),
        f"{' and '.join(reader.name for reader in readers)} reads no {kind.title} of {model.title}; use --format lora "
        "for other programs, or --format diffusers for a whole pipeline with it",
    )
    for reader in reading:
        why = kind.unreadable(reader, changes)
        require(not why, f"{reader.name} would not load this {kind.title}: {why}")
        require(
            kind.applied_by(reader, form, model.diffusers_class),
            f"{reader.name} would not apply a {kind.title} from a file of this format; use {_EACH}",
        )
        dropped = reader.dropped(form, model.diffusers_class, layers)
        if dropped:
            named = ", ".join(dropped[:_MOST]) + (" ..." if len(dropped) > _MOST else "")
            raise ConfigError(
                f"{reader.name} would drop {len(dropped)} of the {len(layers)} adapted layers from a file of this "
                f"format: {named}; use {_EACH}, which lose none, or train again with --lora.targets that leave "
                "them out"
            )


def _save(folder: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], dtype: torch.dtype) -> None:
    """Write the file; numbers and DoRA's magnitudes stay in fp32: 16 bits would scale whole weights by up to 0.4 %."""
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    exact = tuple({form.magnitude for form in (forms.DIFFUSERS, forms.NATIVE)})
    dtypes = {name: dtype if shape and not name.endswith(exact) else torch.float32 for name, shape in shapes.items()}
    write_tensors(
        folder / WEIGHTS_FILE, shapes, dtypes, lambda name: representable(name, tensors[name], dtypes[name]), metadata
    )


def _frozen(exported: Exported) -> Read:
    """Return a reader of the frozen weights, which are looked for when the first is read."""

    @cache
    def reader() -> Read:
        config, saved = exported.config, exported.saved
        check_base(config.pretrained, config.lora, None if saved is None else saved.manifest.get("base"))
        return base_weights(config)[1]

    return lambda name: reader()(name)


def adapter_format(
    form: Callable[[ModelConfig], Form],
    use: Callable[[RunConfig, Place, int], str],
    *readers: Reader,
    finish: Callable[[ModelConfig, Tensors, Metadata], tuple[Tensors, Metadata]] = lambda model, *file: file,
) -> ExportFormat:
    """Return the export format of an adapter.

    Args:
        form: of the file.
        use: Markdown for the card.
        readers: programs that it is for.
        finish: returns tensors and metadata of the file from those of the form.
    """

    def write(folder: Path, exported: Exported) -> None:
        config, model = exported.config.lora, exported.config.model
        weights = {name: exported.weights.read(name) for name in exported.weights.shapes}
        kind = kind_of(config)
        check_readers(form(model), readers, model, kind, kind.changes(weights, config))
        tensors, metadata = file_of(form(model), weights, config, model, _frozen(exported))
        _save(folder, *finish(model, tensors, metadata), exported.dtype)

    return ExportFormat(write=write, use=use, adapter=True)


def in_diffusers(config: RunConfig, place: Place) -> str:
    """Return Markdown that draws with the pipeline of a run and an adapter."""
    base = config.pretrained
    given = {"revision": base.revision, "variant": base.variant}
    version = "".join(f', {name}="{value}"' for name, value in given.items() if value is not None)
    load = from_pretrained(base_name(base), version)
    code = f'{load}pipeline.load_lora_weights("{place}")\n{drawing(config)}'
    return python(code) + where_base_is(base)


def use_in_diffusers(config: RunConfig, place: Place, step: int) -> str:
    """Return the card's text of diffusers' form for that program."""
    return in_diffusers(config, place) + (
        "\nThe names are those of diffusers and peft, and the scale is in the weights (alpha is the rank). "
        f"ComfyUI reads `fastdiff export --format {kind_of(config.lora).for_comfyui}`.\n"
    )


def in_comfyui(config: RunConfig, what: str) -> str:
    """Return the card's text of a file for ComfyUI; ``what``: sentences that tell how its layers are named."""
    kind = kind_of(config.lora)
    instead = (
        f"diffusers reads `fastdiff export --format {kind.for_diffusers}`.\n"
        if reads(DIFFUSERS_READER, forms.DIFFUSERS, config.model, kind)
        else f"diffusers reads no {kind.title} of this network; `fastdiff export --format diffusers` writes a whole "
        "pipeline with it.\n"
    )
    return f"{_IN_COMFYUI}{what} {instead}"


def use_native(config: RunConfig, place: Place, step: int) -> str:
    """Return the card's text of native names."""
    return in_comfyui(
        config,
        "The layers have the names of the original checkpoint, and the scale is in the weights (alpha is the rank).",
    )


def use_kohya(config: RunConfig, place: Place, step: int) -> str:
    """Return the card's text of kohya's names."""
    trained = KOHYA_READER.reads(forms.KOHYA, config.model.diffusers_class)
    module = kind_of(config.lora).network_module
    trainers = f" kohya's scripts go on from it by `--network_module {module} --network_weights`." if trained else ""
    return in_comfyui(config, f"The layers have kohya's names, with alpha beside each.{trainers}")


def _use_everywhere(config: RunConfig, place: Place, step: int) -> str:
    if not reads(DIFFUSERS_READER, forms.DIFFUSERS, config.model, kind_of(config.lora)):
        return in_comfyui(config, "The layers have diffusers' names, and the scale is in the weights.")
    return in_diffusers(config, place) + (
        f"\nComfyUI (`models/loras`) reads the same `{WEIGHTS_FILE}` with the same strength, because the scale is in "
        "the weights (alpha is the rank); give it a name of its own there.\n"
    )


def _use_of_another(config: RunConfig, place: Place, step: int) -> str:
    return load_safetensors(config.model, config.objective, place, WEIGHTS_FILE) + (
        f"\n{kind_of(config.lora).formula}\n"
    )


FOR_DIFFUSERS = adapter_format(lambda model: forms.DIFFUSERS, use_in_diffusers, DIFFUSERS_READER)
"""``lora-diffusers``."""
EVERYWHERE = adapter_format(lambda model: forms.DIFFUSERS, _use_everywhere, DIFFUSERS_READER, COMFYUI)
"""``lora`` of a transformer that diffusers and ComfyUI have."""
NATIVE = adapter_format(lambda model: forms.NATIVE, use_native, COMFYUI)
"""``lora-native``."""
KOHYA = adapter_format(lambda model: forms.KOHYA, use_kohya, COMFYUI, KOHYA_READER)
"""``lora-kohya``."""
LORA = adapter_format(lambda model: forms.DIFFUSERS, _use_of_another)
"""The adapter of a network that no program with adapters knows."""
