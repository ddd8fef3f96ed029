"""Model family: one frozen record per network with all that the other packages need of it.

A configuration names its family (``ModelConfig.family``), which is imported on first use. So a network can come from
another package, which provides a configuration, a network derived from ``BlockwiseModel``, and a family.

The configuration determines the conditions. A class-conditional network takes ``label``, where ``classes`` is the null
class (also if ``classes`` is 0); a text-conditional network the embeddings of captions (``ModelConfig.conditions``).
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Generic, Literal, Protocol, TypeVar

from torch import Tensor, nn

from fastdiff.config.networks.registry import ModelConfig
from fastdiff.errors import ConfigError
from fastdiff.models.blockwise import BlockwiseModel
from fastdiff.models.fused import Declared
from fastdiff.models.pipeline_settings import PipelineSettings
from fastdiff_kernels.names import AttentionBackend

C = TypeVar("C", bound=ModelConfig)
C_contra = TypeVar("C_contra", bound=ModelConfig, contravariant=True)


class Build(Protocol[C_contra]):
    """Constructor of a network on torch's default device, with initial weights from its global generator."""

    def __call__(
        self, config: C_contra, /, *, recompute: bool, attention: AttentionBackend, seed: int
    ) -> BlockwiseModel:
        """Return the network.

        Args:
            config: shape of the network.
            recompute: recompute each block in the backward pass instead of storing its activations.
            attention: implementation of attention, see ``fastdiff_kernels.attention``.
            seed: key of its dropout in training, in [0, 2**64).
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedClass:
    """Network class of another project that loads these weights under their names."""

    owner: str
    """Owner of the class: ``the published DiT``."""
    call: str
    """Code that constructs the class for these weights."""
    sampler: str = "its class"
    """Origin of the sampler, as a noun phrase."""
    samples_previous_x: bool = True
    """Whether its sampler supports networks that predict the mean of the previous step."""
    note: str = ""
    """Sentence about differences of the class; empty: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFamily(Generic[C]):
    """Properties of a network that its configuration and its module do not provide."""

    config: type[C]
    """Type of its configuration."""
    build: Build[C]
    multiply_adds: Callable[[C], float]
    """Multiply-adds of a forward pass on one sample, in matrix products and convolutions."""
    input_multiply_adds: Callable[[C], float]
    """Multiply-adds of the layers whose inputs (noisy latents, captions, time features) need no gradient."""
    subject: Callable[[C], str]
    """Name on the card of an exported model: ``A class-conditional diffusion transformer``."""
    saved_multiply_adds: Callable[[C], float] = lambda config: 0.0
    """Multiply-adds of a forward pass on one sample that training saves by leaving tokens out."""
    license: Callable[[C], str] = lambda config: ""
    """License of the published weights of this shape, for the card; empty: there are several, or none."""
    published: Callable[[C], PublishedClass | None] = lambda config: None
    """Published class that loads its weights; None: there is none."""
    library: str = ""
    """Library that has the network with the same weight names, as named on the Hugging Face hub; empty: none."""
    formats: Mapping[str, str] = field(default_factory=dict)
    """Additional export formats: ``module:NAME`` of each ``ExportFormat``, imported on export."""
    options: Callable[[C], str] = lambda config: ""
    """Flags of what the published network lacks; with any, it has the formats ``lora`` and ``safetensors`` alone."""
    script_format: str = "safetensors"
    """Format of the script that usually trains it elsewhere; ``fastdiff compat`` prints its export."""
    adapter_formats: tuple[str, ...] = ("lora",)
    """Formats of an adapter, that of such a script last."""
    pipeline_part: Literal["transformer", "unet"] = "transformer"
    """Name of the network in pipelines of diffusers, and in adapter files."""
    quantized_blocks: tuple[type[nn.Module], ...] = ()
    """Classes of the blocks whose frozen linear layers ``--lora.quantize`` stores in 8 or 4 bits; empty: all blocks."""
    fp8_block: Any = None
    """Class of its blocks in FP8 (``models.fp8.Fp8Block``), derived from that of its blocks; None: it has none."""
    drawing: Callable[[C], PipelineSettings] = lambda config: PipelineSettings()
    """How its published pipeline draws; the guidance is also the default of networks trained from random weights."""
    sampling_batch: int = 256
    """Default number of images per forward pass."""
    buffers: Callable[[C], dict[str, Tensor]] = lambda config: {}
    """Buffers that the configuration determines, on the CPU; published files list them first. Those of a pretrained
    pipeline replace them."""
    unused: Callable[[C], dict[str, Tensor]] = lambda config: {}
    """Parameters of published files that change no output, as zeros. They are not trained, so weight decay moves none;
    those of a pretrained pipeline replace them."""
    training_only: str = ""
    """How the names of parameters begin that only the training has, and exports leave out; empty: none."""
    tables: Callable[[C], frozenset[str]] = lambda config: frozenset()
    """Names of further tensors of published files, which the network computes instead; ``check_published`` compares
    them."""
    draws_on_meta: bool = False
    """Whether the constructor initialises by operations that also run on the device ``meta`` and never asks for a
    value (as ``trunc_normal_`` does): ZeRO-3 then draws the weights one by one, and no rank holds all of them."""
    matrices: Callable[[C], Declared] = lambda config: {}
    """Which weights with two or more dimensions hold matrices of hidden layers, and how; every one is named."""
    check_published: Callable[[Path, Collection[str], Mapping[str, Tensor]], None] = lambda path, names, buffers: None
    """Raise ConfigError for a file of another network, by the names of its weights and the values of ``buffers``."""


def family_of(config: C | type[C]) -> ModelFamily[C]:
    """Return the family of a network for its configuration, or the type of that; ConfigError: it names none."""
    return _family(config.family)


@cache
def _family(name: str) -> ModelFamily[Any]:
    found = resolve_name(name)
    if not isinstance(found, ModelFamily):
        raise ConfigError(f"{name} is a {type(found).__name__}, expected the ModelFamily of a network")
    return found
