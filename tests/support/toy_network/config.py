"""Shape of the toy network."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from fastdiff.config.networks.registry import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyConfig(ModelConfig):
    """A perceptron over all pixels."""

    kind: Literal["toy"] = "toy"
    """Kind of the network; not to be changed."""
    channels: int = 1
    """Channels of the images."""
    size: int = 8
    """Height and width of the images."""
    classes: int = 10
    """Number of classes."""
    hidden: int = 32
    """Width of the hidden layers."""

    family: ClassVar[str] = "toy_network.family:TOY"
    title: ClassVar[str] = "a toy network"
