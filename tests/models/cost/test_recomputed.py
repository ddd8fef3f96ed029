"""Passes that recompute a part of the blocks: what they hold at once, counted without memory, and really."""

import ctypes
import gc
from typing import Any

import pytest
import torch

from fastdiff.config.networks.adm import AdmConfig
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.objective import DdpmConfig, FlowConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.models.build import build_model
from fastdiff.models.cost.dry_network import dry_inputs
from fastdiff.planning.network import read_network
from tests.support.references.transformer_families import FAMILIES

CPU = torch.device("cpu")
NETWORKS: dict[str, ModelConfig] = {
    "dit": DiTConfig(depth=6, hidden=96, heads=3, channels=4, size=32, classes=10),
    "unet": UNetConfig(
        size=32, block_out_channels=(32, 64, 64), attention_heads=(2, 4, 4), transformer_layers=(1, 2, 0),
        layers_per_block=1, cross_attention_dim=64,
    ),
    "adm": AdmConfig(size=32, width=32, channel_mult=(1, 2), res_blocks=1, attention_resolutions=(16,), classes=10),
    **{name: family.config for name, family in FAMILIES.items()},
}  # fmt: skip
"""Blocks of one size, of several ones, with the skip connections of UNets, and of several classes."""


def run(model: ModelConfig, *, stored: int | None) -> RunConfig:
    performance = PerformanceConfig(
        device="cpu", precision="fp32", recompute=stored is not None, stored_blocks=stored or 0
    )
    convention = model.flow_convention
    objective = DdpmConfig() if convention is None else FlowConfig(convention=convention)
    return RunConfig(model=model, objective=objective, performance=performance)


@pytest.mark.parametrize("kind", NETWORKS)
def test_any_number_of_stored_blocks_follows_from_none_and_all(kind: str) -> None:
    """Against the pass itself: its operations are equal, and what it holds within 2 % (a UNet, by its skip maps)."""
    model = NETWORKS[kind]
    network = read_network(run(model, stored=None), CPU, varies=True)
    peaks = []
    for stored in sorted({0, 1, network.blocks // 3, network.blocks - 1, network.blocks}):
        config = run(model, stored=stored)
        found, exact = (each.traced(config.performance) for each in (network, read_network(config, CPU)))
        for name in ("matmul", "convolution", "attention", "short_attention", "bytes", "launches", "recomputed"):
            assert getattr(found, name) == pytest.approx(getattr(exact, name), rel=1e-6), (stored, name)
        assert found.saved == pytest.approx(exact.saved, rel=0.02), stored
        assert found.peak(64) == pytest.approx(exact.peak(64), rel=0.02), stored
        peaks.append(exact.peak(64))
    assert peaks[0] == pytest.approx(peaks[1], rel=0.05), "the last block is needed whole in either case"
    assert peaks[0] < 0.8 * peaks[-1]
    plain = network.traced(run(model, stored=None).performance)
    assert plain == network.traced(run(model, stored=network.blocks).performance)
    assert plain.recomputed == 0
    assert network.traced(run(model, stored=0).performance).recomputed > 0.5


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    ]


def in_use() -> int:
    """Bytes that are allocated in this process."""
    gc.collect()
    mallinfo: Any = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


@pytest.mark.parametrize("kind", ["dit", "unet"])
@pytest.mark.parametrize("part", [0.25, 0.75])
def test_a_network_keeps_as_much_as_counted(kind: str, part: float) -> None:
    """Real memory at the end of a forward pass, within a tenth."""
    samples, model = 8, NETWORKS[kind]
    network = build_model(model, recompute=True, attention="sdpa")
    stored = int(part * len(network.blocks_in_order()))
    network.store_blocks(stored)
    noisy, condition = dry_inputs(model, network.inputs, samples)
    time = torch.zeros(samples)
    network(noisy, time, **condition)  # what is allocated once
    before = in_use()
    prediction = network(noisy, time, **condition)
    measured = in_use() - before
    del prediction
    config = run(model, stored=stored)
    counted = samples * read_network(config, CPU).traced(config.performance).saved
    assert counted / measured == pytest.approx(1, abs=0.1), f"{measured / 2**20:.1f} MiB, {counted / 2**20:.1f} counted"
