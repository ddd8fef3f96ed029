"""Training states in published files, and files with other contents."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._utils import _flatten_dense_tensors

from fastdiff.config.networks.adm import AdmConfig
from fastdiff.errors import ConfigError
from fastdiff.models.build import build_model
from fastdiff.models.pretrained.pickles import load_published
from fastdiff.models.pretrained.training_state import read_published_training
from tests.support.injected.hostile_files import repeated, zip_of

ADM = AdmConfig(
    channels=1, size=8, width=8, channel_mult=(1, 2), res_blocks=1, attention_resolutions=(4,), heads=2, classes=10,
    norm_num_groups=4,
)  # fmt: skip


def test_a_training_in_16_bits_of_improved_diffusion(tmp_path: Path) -> None:
    """Its optimizer has one parameter, all weights one after another."""
    torch.manual_seed(0)
    weights = {name: value.detach() for name, value in build_model(ADM, seed=1).named_parameters()}
    flat = nn.Parameter(torch.cat([value.flatten() for value in weights.values()]))
    adamw = torch.optim.AdamW([flat])
    flat.grad = torch.randn_like(flat)
    adamw.step()
    torch.save(weights, tmp_path / "model012345.pt")
    torch.save(adamw.state_dict(), tmp_path / "opt012345.pt")
    read = read_published_training(tmp_path / "model012345.pt")
    assert read.step == 12345
    assert read.optimizer is not None
    joined = torch.cat([read.optimizer.exp_avg[name].flatten() for name in weights])
    assert torch.equal(joined, adamw.state[flat]["exp_avg"])
    assert all(read.optimizer.exp_avg[name].shape == value.shape for name, value in weights.items())


def test_a_training_in_16_bits_of_guided_diffusion(tmp_path: Path) -> None:
    """Its optimizer has two parameters, all vectors and all else: moments of the same steps as one by one."""
    model = build_model(replace(ADM, qkv_order="qkv_major", resblock_updown=True), seed=1)
    parameters = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(0)
    vectors, matrices = ([p for p in parameters.values() if (p.dim() > 1) == given] for given in (False, True))
    masters = [nn.Parameter(_flatten_dense_tensors(some).detach()) for some in (vectors, matrices)]
    masters[1] = nn.Parameter(masters[1].detach()[None])
    flat, single = torch.optim.AdamW(masters), torch.optim.AdamW(model.parameters())
    for _ in range(2):
        for p in parameters.values():
            p.grad = torch.randn(p.shape, generator=generator)
        for master, some in zip(masters, (vectors, matrices), strict=True):
            master.grad = _flatten_dense_tensors([p.grad for p in some]).view(master.shape)
        flat.step()
        single.step()
    torch.save(model.state_dict(), tmp_path / "model000001.pt")
    torch.save(flat.state_dict(), tmp_path / "opt000001.pt")
    read = read_published_training(tmp_path / "model000001.pt").optimizer
    assert read is not None
    assert read.applied == 2
    for moment, found in (("exp_avg", read.exp_avg), ("exp_avg_sq", read.exp_avg_sq)):
        assert found.keys() == parameters.keys()
        assert all(torch.equal(found[name], single.state[p][moment]) for name, p in parameters.items())
    state = flat.state_dict()
    state["state"][1]["exp_avg_sq"] = torch.zeros(1, 7)
    torch.save(state, tmp_path / "opt000001.pt")
    with pytest.raises(ConfigError, match=rf"shape \(1, 7\), expected \({masters[1].numel()},\); give"):
        read_published_training(tmp_path / "model000001.pt")


W = {"w": torch.zeros(2)}
MOMENT = torch.zeros(2)
OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
PAIR = {"param_groups": [{**OPTIONS, "params": [0, 1]}]}


def adam(**changes: Any) -> dict[str, Any]:
    state = {"step": torch.tensor(1.0), "exp_avg": MOMENT, "exp_avg_sq": MOMENT} | changes
    return {"state": {0: state}, "param_groups": [{**OPTIONS, "params": [0]}]}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("opt000001.pt", {"state": {}}, "its optimizer is not an AdamW"),
        ("opt000001.pt", {"state": {0: {"step": 1}}, "param_groups": [{"params": [0]}]}, "is not an AdamW"),
        ("opt000001.pt", {"state": [1], "param_groups": []}, "is not an AdamW"),
        ("opt000001.pt", adam(exp_avg=3), "is not an AdamW"),
        ("opt000001.pt", adam(step=float("inf")), "is not an AdamW"),
        ("opt000001.pt", adam(step=float("nan")), "is not an AdamW"),
        ("opt000001.pt", adam(step=torch.tensor(float("nan"))), "is not an AdamW"),
        ("opt000001.pt", adam(step=-5), r"its AdamW has taken -5 steps, expected 0 or more; give the files"),
        ("opt000001.pt", {**adam(), "param_groups": []}, "is not an AdamW"),
        ("opt000001.pt", {**adam(), "param_groups": [{"params": [0]}]}, "is not an AdamW"),
        ("opt000001.pt", {**adam(), "param_groups": [{**OPTIONS, "params": [0], "lr": "a"}]}, "is not an AdamW"),
        (
            "opt000001.pt", adam(exp_avg=torch.zeros(3)),
            r"opt000001.pt: its optimizer belongs to other weights: parameter 0 has the shape \(3,\), expected \(2,\); "
            r"give the files of one training, or start from the weights alone, without --pretrained.training",
        ),
        (
            "opt000001.pt", {**adam(), "param_groups": [{**OPTIONS, "params": [0, 1, 2]}]},
            r"it has 3 parameters, expected 1, or for fp16 training 1 \(improved-diffusion\) or 2 \(guided-",
        ),
        (
            "opt000001.pt", {**adam(), "param_groups": [{**OPTIONS, "params": [1]}]},
            "the state of unknown parameters",
        ),
        (
            "opt000001.pt", {**adam(), "state": {n: adam(step=n + 7.0)["state"][0] for n in range(2)}} | PAIR,
            r"its AdamW has taken \[7, 8\] steps, expected one number; give the files of one training",
        ),
        ("opt000001.pt", adam(step=102.0), "its name has step 1, but its AdamW has taken 102 steps; give the files"),
        ("opt000002.pt", adam(), "model000001.pt: its folder has opt000002.pt, but no such file of the same step"),
        ("opt000001.pt", adam(exp_avg_sq=torch.zeros(1, 2)), r"has the shape \(1, 2\), expected \(2,\)"),
        ("ema_0.9_1000001.pt", W, "its folder has ema_0.9_1000001.pt, but no such file"),
        ("opt1000001.pt", adam(), "its folder has opt1000001.pt, but no such file"),
        ("ema_0.9_000002.pt", W, "its folder has ema_0.9_000002.pt, but no such file of the same step; give the"),
        ("opt000001.pt", adam(exp_avg=torch.zeros(1).expand(10**9)), "bytes, more than the"),
        ("opt000001.pt", adam(step=bytearray(3)), "code in it is never run"),
        ("ema_0.9_000001.pt", {"v": torch.zeros(2)}, "the average belongs to other weights"),
        ("ema_abc_000001.pt", W, "could not convert string to float"),
        ("model000002.pt", [1, 2], "expected a dict, it holds list"),
        ("model000002.pt", {"w": 3}, "expected a state dict"),
        ("0000002.pt", {"ema": W}, "expected a state dict under 'model'"),
        ("0000002.pt", {"model": W, "opt": 7}, "is not an AdamW"),
        ("0000002.pt", {"model": W, "ema": {"w": torch.zeros(3)}}, "the average belongs to other weights"),
    ],
)  # fmt: skip
def test_files_that_hold_something_else_are_refused(tmp_path: Path, name: str, content: Any, message: str) -> None:
    torch.save(W, tmp_path / "model000001.pt")
    torch.save(content, tmp_path / name)
    weights = name if name.startswith(("model", "0")) else "model000001.pt"
    with pytest.raises(ConfigError, match=message):
        read_published_training(tmp_path / weights)


def test_parameters_are_read_without_their_gradients(tmp_path: Path) -> None:
    """As which improved-diffusion writes the weights and their averages."""
    parameters = {"w": nn.Parameter(torch.ones(2))}
    for name in ("model000001.pt", "ema_0.9_000001.pt"):
        torch.save(parameters, tmp_path / name)
    torch.save(adam(exp_avg=nn.Parameter(torch.ones(2))), tmp_path / "opt000001.pt")
    read = read_published_training(tmp_path / "model000001.pt")
    assert read.optimizer is not None
    alone = load_published(tmp_path / "model000001.pt")
    for found in (read.weights, read.averages[0.9], read.optimizer.exp_avg, alone):
        assert found["w"].tolist() == [1.0, 1.0]
        assert not found["w"].requires_grad


def test_files_of_other_steps_beside_those_of_one_do_not_matter(tmp_path: Path) -> None:
    for step in ("000001", "000002", "1000001"):
        torch.save({"w": torch.full((2,), float(step))}, tmp_path / f"model{step}.pt")
        torch.save({"w": torch.full((2,), -float(step))}, tmp_path / f"ema_0.9999_{step}.pt")
        torch.save(adam(), tmp_path / f"opt{step}.pt")
    read = read_published_training(tmp_path / "model000002.pt")
    assert read.step == 2
    assert read.weights["w"].tolist() == [2.0, 2.0]
    assert read.averages[0.9999]["w"].tolist() == [-2.0, -2.0]


def test_a_damaged_file_is_refused_or_has_the_same_weights(tmp_path: Path) -> None:
    """Bits that are flipped, bytes that are lost, ends that are cut off: never other weights, never another error."""
    weights, path, rng = {"w": torch.randn(40, 50)}, tmp_path / "whole.pt", random.Random(0)
    torch.save({"ema": weights}, path)
    whole = path.read_bytes()
    refused = 0
    for number in range(300):
        place = rng.randrange(len(whole))
        flipped = whole[:place] + bytes([whole[place] ^ 1 << number % 8]) + whole[place + 1 :]
        damaged = (flipped, whole[:place] + whole[place + 7 :], whole[:place])[number % 3]
        (tmp_path / f"{number}.pt").write_bytes(damaged)
        try:
            assert load_published(tmp_path / f"{number}.pt")["w"].equal(weights["w"])
        except ValueError:
            refused += 1
    assert refused > 250
    place = whole.index(weights["w"].numpy().tobytes()) + 1000
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(ValueError, match=r"it is damaged.*: the crc32 of its part whole/data/0 differs"):
        load_published(path)


def test_names_and_sizes_that_lie_are_refused(tmp_path: Path) -> None:
    zip_of(tmp_path / "model000001.pt", repeated)
    with pytest.raises(ConfigError, match="bytes, more than the"):
        read_published_training(tmp_path / "model000001.pt")
    torch.save(adam(), tmp_path / "opt000001.pt")
    with pytest.raises(ValueError, match="it is the state of an optimizer; expected weights"):
        load_published(tmp_path / "opt000001.pt")
    for path in (tmp_path, tmp_path / "opt000001.pt", tmp_path / "0000009.pt", tmp_path / "model000009.pt"):
        with pytest.raises(ConfigError, match=r"expected modelNNNNNN\.pt of improved-diffusion or guided-d.*, or N"):
            read_published_training(path)
