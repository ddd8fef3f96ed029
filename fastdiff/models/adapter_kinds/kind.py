"""The record of a kind of adapter: all that the other modules need of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor, nn

from fastdiff.config.networks.pretrained import LoraConfig
from fastdiff.models.adapter_files.forms import Change, Form, metadata_of
from fastdiff.models.adapter_files.native_names import NamedNetwork
from fastdiff.models.adapter_files.readers import Reader
from fastdiff.models.build import Model

C = TypeVar("C", bound=Change)
Read = Callable[[str], Tensor]
"""Returns a frozen weight by its name, fp32 on the CPU."""


@dataclass(frozen=True, slots=True)
class FileLayer:
    """A layer of an adapter file."""

    key: str
    """Its name in the file, for messages."""
    tensors: Mapping[str, Tensor]
    """By the values of ``AdapterKind.spellings``, and ``alpha`` if there is one; fp32."""
    shape: tuple[int, ...]
    """Of the weight that it changes, ``[outputs, inputs, ...]``."""
    alpha: Callable[[int], float]
    """Returns alpha from the rank."""
    metadata: Mapping[str, str]
    """Of the file."""
    network: str
    """For messages, with an article."""


def metadata_of_lora(
    form: Form, part: str, config: LoraConfig, layers: Sequence[str], **more: object
) -> dict[str, str]:
    """Return the metadata of the file of a LoRA; arguments as of ``AdapterKind.metadata`` and ``forms.metadata_of``."""
    return metadata_of(form, part, config.rank, config.numerator, layers, more)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterKind(Generic[C]):
    """A kind of adapter."""

    title: str
    """For messages and cards."""
    inject: Callable[[Model, LoraConfig, list[str]], None]
    """Replace these layers by adapted ones with fp32 values, drawn from torch's global generator, in place. Each has
    the frozen layer as ``base_layer`` and ``enable_adapters(bool)``. ConfigError: a package is missing; ValueError: a
    layer cannot be adapted."""
    parameters: tuple[str, ...]
    """Ends of the names of the trained parameters of a layer."""
    of_base: Callable[[Tensor], Mapping[str, Tensor]] | None = None
    """Return buffers of a layer, and first values of parameters, that follow from its frozen weight as it is used, by
    the ends of their names. Such a parameter is all 0 until it is set. None: nothing does."""
    unchanged: Callable[[nn.Module], Mapping[str, Tensor]] = lambda layer: {}
    """Return the values of parameters, by the ends of their names, with which a layer changes nothing if all others
    are 0; without one all are."""
    change: Callable[[Mapping[str, Tensor], LoraConfig], C]
    """Return the change of a layer from its parameters, by the ends of their names."""
    start: Callable[[Mapping[str, Tensor], C, LoraConfig], None]
    """Give fresh parameters of a layer, by the ends of their names, the values of a change, in place."""
    spellings: Mapping[str, str]
    """Ends of keys in files of every form, and what the tensor is."""
    expected: str
    """These tensors of a layer in words, for messages."""
    read: Callable[[FileLayer], C]
    """Return the change of a layer in a file; ConfigError: a tensor is missing or has another shape."""
    for_form: Callable[[Mapping[str, C], Form, NamedNetwork, Read], dict[str, C]] = lambda changes, *of: dict(changes)
    """Return the changes for a form of file, of layers by their names in diffusers; with a reader of the frozen
    weights."""
    formula: str = "A layer changes by B A (`lora_B` times `lora_A`): the scale alpha / rank is in B."
    """How a layer changes by the tensors of diffusers' form, for cards."""
    for_diffusers: str = "lora"
    for_comfyui: str = "lora"
    """Formats of the export that these programs read, for the cards of other formats."""
    size: Callable[[LoraConfig], str] = lambda config: f"rank {config.rank}, alpha {config.numerator:g}"
    """Return how large its matrices are in words, and alpha if it has an effect, for cards and the summary of a run."""
    fitted: Callable[[LoraConfig, Mapping[str, C], Mapping[str, tuple[int, ...]]], LoraConfig] = (
        lambda config, changes, weights: config
    )
    """Return the configuration with the options of the kind that a file has, from its changes and the shapes of all
    weights by layer; ConfigError: no options fit."""
    metadata: Callable[[Form, str, LoraConfig, Sequence[str]], dict[str, str]] = metadata_of_lora
    """Return the metadata of a file from its form, the part of the pipeline, and the layers' names in diffusers."""
    network_module: str = "networks.lora"
    """Of kohya's scripts, which go on from its files."""
    unreadable: Callable[[Reader, Mapping[str, C]], str] = lambda reader, changes: ""
    """Return why a program that reads the kind would not load a file of these changes; empty: it does."""
    refused_by: Callable[[Reader, Form, str], bool] = lambda reader, form, diffusers_class: False
    """Whether a program refuses it, and says so, in a form in which it reads a LoRA of this class of diffusers."""
    applied_by: Callable[[Reader, Form, str], bool] = lambda reader, form, diffusers_class: True
    """Whether a program applies it from a form in which it reads a LoRA of this class of diffusers."""

    def changes(self, weights: Mapping[str, Tensor], config: LoraConfig) -> dict[str, C]:
        """Return the change of each layer from all trained parameters by name."""
        return {layer: self.change(self.of_layer(weights, layer), config) for layer in self.layers(weights)}

    def layers(self, names: Mapping[str, object]) -> list[str]:
        """Return the adapted layers from the names of the trained parameters."""
        found = (name.removesuffix(end) for name in names for end in self.parameters if name.endswith(end))
        return list(dict.fromkeys(found))

    def of_layer(self, weights: Mapping[str, Tensor], layer: str) -> dict[str, Tensor]:
        """Return the parameters of a layer by the ends of their names."""
        return {end: weights[layer + end] for end in self.parameters if layer + end in weights}
