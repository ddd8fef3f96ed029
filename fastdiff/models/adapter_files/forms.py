"""Forms of adapter files: prefix and names of the layers, names of the matrices, and where the scale is."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self, TypeVar

from torch import Tensor

from fastdiff.models.adapter_files.native_names import NamedNetwork


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """A form of file."""

    name: str
    """For ``readers``."""
    native: bool
    """Whether the layers have their native names and layout."""
    prefix: str
    """Before the name of each layer; empty: the part of the pipeline."""
    flat: bool
    """Whether the dots in the name of a layer are underscores."""
    down: str
    up: str
    magnitude: str
    """End of the keys of DoRA's magnitudes."""
    alpha: bool
    """Whether alpha is a tensor beside each layer. Otherwise the scale is in B, and alpha is the rank."""

    def key(self, part: str, layer: str) -> str:
        """Return the key of a layer of this part of a pipeline, without the ending of a matrix."""
        prefix = self.prefix or f"{part}."
        return prefix + (layer.replace(".", "_") if self.flat else layer)


DIFFUSERS = Form(
    name="diffusers", native=False, prefix="", flat=False, down=".lora_A.weight", up=".lora_B.weight",
    magnitude=".lora_magnitude_vector", alpha=False,
)  # fmt: skip
"""diffusers and peft."""
NATIVE = Form(
    name="native", native=True, prefix="diffusion_model.", flat=False, down=".lora_A.weight", up=".lora_B.weight",
    magnitude=".dora_scale", alpha=False,
)  # fmt: skip
KOHYA = Form(
    name="kohya", native=True, prefix="lora_unet_", flat=True, down=".lora_down.weight", up=".lora_up.weight",
    magnitude=".dora_scale", alpha=True,
)  # fmt: skip
"""kohya's scripts, of SDXL and later networks."""
KOHYA_DIFFUSERS = replace(KOHYA, native=False)
"""kohya's scripts of SD 1.x and 2.x, which train diffusers' UNet; every program that reads one reads the other."""


class Change(Protocol):
    """The change of a weight by an adapter."""

    @property
    def rank(self) -> int:
        """Rank of its matrices."""
        ...

    @property
    def scale(self) -> float:
        """Factor of their product."""
        ...

    def merged(self, weight: Tensor) -> Tensor:
        """Return the changed weight, ``[outputs, inputs, ...]``."""
        ...

    def tensors(self, form: Form) -> dict[str, Tensor]:
        """Return the tensors of a file by the ends of their keys."""
        ...

    def with_halves_swapped(self) -> Self:
        """Return the change of the layer whose first and second half of outputs are swapped."""
        ...

    def stacked(self, parts: Sequence[Self | None], rows: Sequence[int]) -> Self:
        """Return the change of a layer that has the outputs of several, itself among them, one after another.

        Args:
            parts: the change of each; None: it stays as it is.
            rows: outputs of each.
        """
        ...

    def split(self, rows: Sequence[int]) -> Sequence[Self | None]:
        """Return the changes of the layers whose outputs a layer has one after another; None: it stays as it is."""
        ...


C = TypeVar("C", bound=Change)

ADAPTER_FORMATS: Mapping[str, str] = {
    "lora": "fastdiff.export.adapters:EVERYWHERE",
    "lora-diffusers": "fastdiff.export.adapters:FOR_DIFFUSERS",
    "lora-native": "fastdiff.export.adapters:NATIVE",
    "lora-kohya": "fastdiff.export.adapters:KOHYA",
}
"""The export formats of a transformer with a table in ``native_names``, for ``ModelFamily.formats``."""


def tensors_of(form: Form, changes: Mapping[str, Change], part: str) -> dict[str, Tensor]:
    """Return the tensors of a file.

    Args:
        form: of the file.
        changes: by the name of the layer; of a native form those of ``in_native_layout``.
        part: name of the network in pipelines of diffusers.
    """
    found: dict[str, Tensor] = {}
    for layer, change in changes.items():
        key = form.key(part, layer)
        found |= {key + end: value for end, value in change.tensors(form).items()}
    return found


def in_native_layout(changes: Mapping[str, C], network: NamedNetwork) -> dict[str, C]:
    """Return the changes of the native layers of a network, from those of its layers in diffusers."""
    found = {}
    for native in network.natives:
        parts = [changes.get(part) for part in native.parts]
        present = [part for part in parts if part is not None]
        if present:
            change = present[0].stacked(parts, network.rows(native)) if len(parts) > 1 else present[0]
            found[native.name] = change.with_halves_swapped() if native.swapped else change
    return found


def metadata_of(
    form: Form, part: str, rank: int, alpha: float, layers: Sequence[str], more: Mapping[str, object] | None = None
) -> dict[str, str]:
    """Return the metadata of a file, by which diffusers knows the scale and kohya's scripts the rank.

    Args:
        form: of the file.
        part: name of the network in pipelines of diffusers.
        rank: of the adapter.
        alpha: of the adapter.
        layers: their names in diffusers. By an end of them, such as ``to_out``, peft would also find containers.
        more: of the kind of adapter.
    """
    more = more or {}
    if form == DIFFUSERS:
        fields = {"r": rank, "lora_alpha": rank, "target_modules": list(layers), **more}
        named = {f"{part}.{name}": value for name, value in fields.items()}
        return {"lora_adapter_metadata": json.dumps(named, indent=2, sort_keys=True)}
    alpha = alpha if form.alpha else rank
    known = {"ss_network_module": "networks.lora", "ss_network_dim": str(rank), "ss_network_alpha": f"{alpha:g}"}
    return known | {name: str(value) for name, value in more.items()}
