"""Validation of an adapter uses the frozen weights of the training, in place of a copy."""

import copy

import torch

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.pretrained import LoraConfig
from fastdiff.models.build import build_model
from fastdiff.models.lora import add_lora
from fastdiff.training.callbacks.shared_base import SharedBase

DIT = DiTConfig(depth=2, hidden=32, heads=2, patch=2, channels=1, size=8, classes=10)


def test_another_adapter_on_the_same_base_predicts_what_a_copy_predicts() -> None:
    """Also of compiled blocks, which are not compiled again; the network is as before, and still trains."""
    torch._dynamo.reset()
    network = build_model(DIT, seed=1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    add_lora(network, LoraConfig(rank=2), seed=3)
    own = {name: p.detach().clone() for name, p in network.named_parameters()}
    other = {name: torch.randn_like(p) for name, p in network.named_parameters() if p.requires_grad}
    whole = copy.deepcopy(network)
    whole.load_state_dict(other, strict=False)
    network.compile_blocks(backend="aot_eager")
    network.train()
    inputs = torch.randn(3, 1, 8, 8), torch.tensor([1, 500, 900])
    label = torch.tensor([0, 4, 9])
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with torch.no_grad():
        found = SharedBase(network, other)(*inputs, label=label)
        assert torch.equal(found, whole.eval()(*inputs, label=label))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert network.training
    assert all(torch.equal(p, own[name]) for name, p in network.named_parameters())
    before = network(*inputs, label=label)
    before.square().mean().backward()
    assert not torch.equal(before, found)
    assert all(p.grad is not None for p in network.parameters() if p.requires_grad)
