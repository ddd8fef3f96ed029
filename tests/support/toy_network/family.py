"""The family of the toy network."""

from fastdiff.models.family import ModelFamily
from fastdiff.models.pipeline_settings import PipelineSettings
from fastdiff_kernels.names import AttentionBackend
from toy_network.config import ToyConfig
from toy_network.network import Toy


def _build(config: ToyConfig, /, *, recompute: bool, attention: AttentionBackend, seed: int) -> Toy:
    return Toy(config, recompute=recompute)


def _into(config: ToyConfig) -> float:
    return float((config.channels * config.size**2 + 1) * config.hidden)


TOY = ModelFamily(
    config=ToyConfig,
    build=_build,
    multiply_adds=lambda config: _into(config) + 2 * config.hidden**2 + _into(config) - config.hidden,
    input_multiply_adds=_into,
    subject=lambda config: "A toy",
    formats={"toy": "toy_network.export:NAMES"},
    drawing=lambda config: PipelineSettings(guidance=1.25),
)
