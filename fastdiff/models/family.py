"""A network's family: what everything else needs to know of a network, in one frozen record per network.

A configuration names its family (``ModelConfig.family``), which is imported when something is asked of it. So a network
can come from another package: it brings a configuration, a network derived from ``BlockwiseModel``, and a family.

What a network is conditioned on, its configuration decides. One of classes takes ``label``, with ``classes`` for no
class, also if it has none of them; one of captions takes the embeddings in ``text_widths``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Generic, Literal, Protocol, TypeVar

from torch import Tensor

from fastdiff.config.networks.registry import ModelConfig
from fastdiff.errors import ConfigError
from fastdiff.models.blockwise import BlockwiseModel
from fastdiff_kernels.names import AttentionBackend

C = TypeVar("C", bound=ModelConfig)
C_contra = TypeVar("C_contra", bound=ModelConfig, contravariant=True)


class Build(Protocol[C_contra]):
    """Makes a network, on torch's default device, initial weights from its global generator."""

    def __call__(
        self, config: C_contra, /, *, recompute: bool, attention: AttentionBackend, seed: int
    ) -> BlockwiseModel:
        """Return the network.

        Args:
            config: its shape.
            recompute: recompute each block in the backward pass instead of storing its activations.
            attention: implementation of attention, see ``fastdiff_kernels.attention``.
            seed: key of what it drops while training, in [0, 2**64).
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedClass:
    """The class of another project that takes a network's weights under their names."""

    owner: str
    """Whose it is: ``the published DiT``."""
    call: str
    """Code that makes it for these weights."""
    sampler: str = "its class"
    """What the sampler comes with."""
    samples_previous_x: bool = True
    """Whether its sampler knows networks that predict the mean of the step before."""
    note: str = ""
    """A sentence about what differs there; empty: nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFamily(Generic[C]):
    """Everything about a network that its configuration and its module do not say themselves."""

    config: type[C]
    """Its configuration."""
    build: Build[C]
    multiply_adds: Callable[[C], float]
    """Multiply-adds of a forward pass on one sample, in matrix products and convolutions."""
    input_multiply_adds: Callable[[C], float]
    """Those of the layers that see noisy latents, captions or an encoding of the time, which need no gradient."""
    subject: Callable[[C], str]
    """What the card of an exported model calls it: ``A class-conditional diffusion transformer``."""
    published: Callable[[C], PublishedClass | None] = lambda config: None
    """The class that its weights fit."""
    library: str = ""
    """Library that has the network with the same names of weights, as the Hugging Face hub calls it."""
    formats: Mapping[str, str] = field(default_factory=dict)
    """Formats of its own that it is exported in: ``module:NAME`` of each ``ExportFormat``, imported for an export."""
    lora_component: Literal["transformer", "unet"] = "transformer"
    """What diffusers calls the network in the file of an adapter."""
    usual_guidance: float = 1.5
    """Scale of classifier-free guidance, where none is asked for."""
    sampling_batch: int = 256
    """Images per forward pass, where no number is asked for."""
    buffers: Callable[[C], dict[str, Tensor]] = lambda config: {}
    """Tensors that the shape decides and that are no parameters, on the CPU; published files have them first."""
    check_published: Callable[[Path, Mapping[str, Tensor]], None] = lambda path, weights: None
    """Raises ConfigError if the buffers among the weights in a published file are not those of the network."""


def family_of(config: C | type[C]) -> ModelFamily[C]:
    """The family of a network, by its configuration or the type of that.

    Raises:
        ConfigError: the configuration names none.
    """
    return _family(config.family)


@cache
def _family(name: str) -> ModelFamily[Any]:
    found = resolve_name(name)
    if not isinstance(found, ModelFamily):
        raise ConfigError(f"{name} is a {type(found).__name__}, expected the ModelFamily of a network")
    return found
