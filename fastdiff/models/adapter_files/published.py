"""Reading of published adapter files, in every form, spelling and rule of alpha that their programs have.

alpha is a tensor beside the layer, or stands in diffusers' metadata of the adapter, or in the configuration beside a
file of peft. Without any it is the rank, as in ComfyUI and diffusers; so it is where kohya's scripts wrote 0.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from safetensors import safe_open
from torch import Tensor

from fastdiff.config.networks.adapter_rank import TEXT_ENCODERS
from fastdiff.errors import ConfigError, require
from fastdiff.models.adapter_files.forms import Change
from fastdiff.models.adapter_files.native_names import NamedNetwork, NativeLayer
from fastdiff.models.adapter_kinds.kind import AdapterKind, FileLayer
from fastdiff.models.adapter_kinds.kinds import KINDS
from fastdiff.models.adapter_kinds.lora import LORA
from fastdiff.models.pipeline_files import readable

_OTHER_KINDS = {
    "dora_scale": "DoRA", "lora_magnitude_vector": "DoRA", "lokr_": "LoKr", "hada_": "LoHa",
    "lora_mid": "LoCon with a third matrix", "oft_": "OFT", ".diff": "full differences", "lora_B.bias": "biases",
}  # fmt: skip
_DIFFUSERS_PREFIXES = ("", "transformer.", "unet.", "base_model.model.", "diffusion_model.")
_FLAT_PREFIXES = ("lora_unet_", "lycoris_", "lora_transformer_")
_NATIVE_PREFIXES = ("diffusion_model.", "model.diffusion_model.", "base_model.model.", "")
_METADATA = "lora_adapter_metadata"
_MOST = 3
"""Layers that a message names."""

C = TypeVar("C", bound=Change)
_Keys = dict[str, dict[str, Tensor]]
"""The tensors of each layer of a file, by the values of ``AdapterKind.spellings``."""


def read_adapter(
    path: Path, network: NamedNetwork, kind: AdapterKind[Any] = LORA, *, skip_text_encoders: bool = False
) -> dict[str, Any]:
    """Read a file of any form.

    Args:
        path: safetensors file; beside that of a folder of peft is its configuration.
        network: that the adapter changes.
        kind: of the adapter.
        skip_text_encoders: leave out layers of text encoders.

    Returns:
        The change of each layer by its name in diffusers, fp32 on the CPU.

    Raises:
        ConfigError: the file cannot be read, is of another kind, or has layers that are not in the network or have
            other shapes there. Nothing else is left out.
    """
    require(path.is_file(), f"--lora.init {path}: no such file")
    require(path.suffix == ".safetensors", f"--lora.init {path}: expected a .safetensors file")
    with readable(path), safe_open(path, framework="pt") as file:
        metadata = (file.metadata() or {}) | _of_peft(path, network.part)
        skipped = TEXT_ENCODERS if skip_text_encoders else ()
        names = [name for name in file.keys() if not name.startswith(skipped)]  # noqa: SIM118  (not a mapping)
        tensors = {name: file.get_tensor(name).float() for name in names}
    try:
        return changes_of(tensors, metadata, network, kind)
    except ConfigError as error:
        raise ConfigError(f"--lora.init {path}: {error}") from None


def _of_peft(path: Path, part: str) -> dict[str, str]:
    """Return the configuration beside a file of peft, as diffusers would have it in the metadata."""
    beside = path.with_name("adapter_config.json")
    if path.name != "adapter_model.safetensors" or not beside.is_file():
        return {}
    with readable(beside):
        found = json.loads(beside.read_text())
    require(isinstance(found, dict), f"{beside} is no object")
    return {_METADATA: json.dumps({f"{part}.{name}": value for name, value in found.items()})}


def changes_of(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    network: NamedNetwork,
    kind: AdapterKind[Any] = LORA,
) -> dict[str, Any]:
    """Return the change of each layer in the tensors of a file; arguments and errors as in ``read_adapter``."""
    keys, known = _by_key(tensors, kind), _known_keys(network)
    _require_known(keys, known, network)
    alphas = _Metadata(metadata)
    changes: dict[str, Any] = {}
    for key, found in keys.items():
        layer = known[key]
        for part, change in _of_parts(key, found, layer, alphas, network, kind):
            require(part not in changes, f"{part} is there twice, the second time as {key}")
            changes[part] = change
    require(bool(changes), f"it has no {kind.title}")
    return changes


def _by_key(tensors: Mapping[str, Tensor], kind: AdapterKind[Any]) -> _Keys:
    keys: _Keys = {}
    others = []
    for name, value in tensors.items():
        ending = next((ending for ending in kind.spellings if name.endswith(ending)), None)
        if ending is None:
            others.append(name)
        else:
            keys.setdefault(name.removesuffix(ending), {})[kind.spellings[ending]] = value
    if others:
        kinds = sorted({other for name in others for part, other in _OTHER_KINDS.items() if part in name})
        what = f", tensors of {' and '.join(kinds)}" if kinds else ""
        ours = "".join(f"; use --lora.kind {name}" for name, known in KINDS.items() if kinds == [known.title])
        raise ConfigError(
            f"{len(others)} of its {len(tensors)} tensors are no matrices of a {kind.title}{what}: {named(others)}; "
            f"expected {kind.expected}{ours}"
        )
    return keys


def _known_keys(network: NamedNetwork) -> dict[str, NativeLayer]:
    """Return what each key of a file would be."""
    known: dict[str, NativeLayer] = {}
    for native in network.natives:
        named = [f"{prefix}{native.name}" for prefix in _NATIVE_PREFIXES]
        known |= dict.fromkeys([*named, f"lora_unet_{native.name.replace('.', '_')}"], native)
    for layer in network.layers:
        own = NativeLayer(layer, (layer,))
        names = [f"{prefix}{spelt}" for prefix in _DIFFUSERS_PREFIXES for spelt in (layer, _of_processor(layer))]
        names += [prefix + layer.replace(".", "_") for prefix in _FLAT_PREFIXES]
        for name in names:
            known.setdefault(name, own)
    return known


def _of_processor(layer: str) -> str:
    """Return the name of an attention's matrix when diffusers had it in its processor."""
    return re.sub(r"\.to_out\.0$", ".to_out", re.sub(r"\.(?=to_\w+(\.0)?$)", ".processor.", layer))


def _require_known(keys: _Keys, known: Mapping[str, object], network: NamedNetwork) -> None:
    unknown = [key for key in keys if key not in known]
    if not unknown:
        return
    text = [key for key in unknown if key.startswith(TEXT_ENCODERS)]
    why = f"{network.title} has none of this name"
    if len(text) == len(unknown):
        why = "they are of text encoders, which are not trained here; --lora.skip-text-encoders leaves them out"
    raise ConfigError(f"{len(unknown)} of its {len(keys)} layers are unknown: {named(unknown)}; {why}")


def _of_parts(
    key: str,
    found: Mapping[str, Tensor],
    layer: NativeLayer,
    alphas: "_Metadata",
    network: NamedNetwork,
    kind: AdapterKind[C],
) -> Iterator[tuple[str, C]]:
    rows = network.rows(layer)
    shape = (sum(rows), *network.layers[layer.parts[0]][1:])
    change = kind.read(
        FileLayer(
            key, found, shape, lambda rank: alphas.of(layer.name, rank, network.part), alphas.metadata, network.title
        )
    )
    try:
        if layer.swapped:
            change = change.with_halves_swapped()
        split = change.split(rows) if len(rows) > 1 else [change]
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    for part, own in zip(layer.parts, split, strict=True):
        if own is not None:
            yield part, own


class _Metadata:
    """The configuration of peft that diffusers writes into the metadata of a file."""

    def __init__(self, metadata: Mapping[str, str]) -> None:
        self.metadata = metadata
        try:
            found = json.loads(metadata.get(_METADATA, "{}"))
        except ValueError:
            raise ConfigError(f"its metadata {_METADATA} is no JSON") from None
        require(isinstance(found, dict), f"its metadata {_METADATA} is no object")
        self._values: dict[str, Any] = found

    def of(self, layer: str, rank: int, part: str) -> float:
        """Return alpha of a layer; without metadata of the network it is the rank."""
        own = {key.removeprefix(f"{part}."): value for key, value in self._values.items() if key.startswith(f"{part}.")}
        alpha = own.get("lora_alpha", own.get("alpha", rank))  # alpha is that of peft's LoKr
        patterns = own.get("alpha_pattern") or {}
        try:
            found = (value for pattern, value in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", layer))
            return float(next(found, alpha)) * (math.sqrt(rank) if own.get("use_rslora") else 1.0)
        except (re.error, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"its metadata {_METADATA} gives no alpha of {layer} ({error}); expected a number as lora_alpha, and "
                "numbers by regular expressions of layers as alpha_pattern"
            ) from None


def named(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")
