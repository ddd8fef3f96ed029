"""Network of an emission: that of a preset, with changes."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import yaml

from fastdiff.config.command_line import config_file
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.presets import preset
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.errors import ConfigError
from fastdiff.models import fp8
from fastdiff.models.build import build_model
from fastdiff_bench import BenchError
from fastdiff_kernels.names import AttentionBackend


@dataclass(frozen=True, slots=True)
class Subject:
    """Network whose code is counted."""

    preset: str
    depth: int | None = None
    """Number of blocks of a transformer; None: the preset's."""
    model: tuple[str, ...] = ()
    """Other fields of the network, each as ``hidden=2048``."""
    fp8: bool = False
    """Whether the wide linear layers of all its blocks multiply in FP8."""
    weight_gradients: Literal["fp8", "bf16"] = "fp8"
    """Of these layers."""
    attention: AttentionBackend = "auto"

    @property
    def name(self) -> str:
        """Name in a record, without the depth: ``dit-xl-2-256 hidden=2048 heads=32 fp8``."""
        chosen = {"fp8": self.fp8, "weight_gradients=bf16": self.weight_gradients == "bf16"}
        chosen[f"attention={self.attention}"] = self.attention != "auto"
        return " ".join((self.preset, *self.model, *(name for name, is_so in chosen.items() if is_so)))

    @property
    def performance(self) -> PerformanceConfig:
        """How it trains; ConfigError: gradients of weights in bf16 are chosen for a network that is in bf16."""
        return PerformanceConfig(
            fp8=self.fp8, fp8_weight_gradients=self.weight_gradients, fp8_ends=0 if self.fp8 else 1,
            attention=self.attention,
        )  # fmt: skip

    def config(self) -> ModelConfig:
        """Return the shape of the network.

        Raises:
            BenchError: there is no such preset or field, a wrong value, or no layer that gains from FP8.
        """
        try:
            base = preset(self.preset)
            if self.depth and not hasattr(base.model, "depth"):
                raise BenchError(
                    f"--depth {self.depth}: the network of {self.preset} has levels instead of a depth; "
                    "leave the flag out"
                )
            fields = dict(map(_field, self.model)) | ({"depth": self.depth} if self.depth else {})
            found = config_file.lay_over(base, {"model": fields}, "--model").model
            if self.performance.fp8:
                with torch.device("meta"):
                    fp8.inner_blocks(build_model(found), self.performance)
        except ConfigError as error:
            raise BenchError(str(error)) from None
        return found


def _field(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise BenchError(f"--model {text}: expected NAME=VALUE, for example hidden=2048")
    return name, yaml.safe_load(value)
